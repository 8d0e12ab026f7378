"""launch/torchrun.sh: losses equal to the local launcher's, on one host and on two, and reports of failures."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascale.core.errors import Exit
from tests.jobs import Job, curve, finish, job_config, lives
from tests.operate.driver.test_one_host import with_planted
from tests.runs import GPT

SCRIPT = Path(__file__).parents[3] / "launch" / "torchrun.sh"
TWO = {"parallel__tp": 2, "train__precision": "fp32"}


class Torchrun(Job):
    """A running launch/torchrun.sh, with the hosts named by the environment."""

    def __init__(self, config: Path, *overrides: str, env: dict[str, str] | None = None) -> None:
        self.folder = config.parent / "runs" / "test"
        self.process = subprocess.Popen(
            [str(SCRIPT), str(config), *overrides],
            env=environment() | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def environment() -> dict[str, str]:
    """This process's environment, without ranks, hosts and addresses."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.slow
def test_the_same_losses_as_our_own_launcher(tmp_path: Path) -> None:
    expected = curve(finish(job_config(tmp_path / "own", GPT, **TWO)))
    job = Torchrun(job_config(tmp_path / "torchrun", GPT, **TWO))
    status, out, err = job.end()
    assert status == Exit.OK, err
    assert curve(job.steps()) == expected
    assert "tp 2 x pp 1 x dp 1 = 2 processes" in out, "without NPROC, as many processes as the layout needs"


@pytest.mark.slow
def test_two_hosts(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **TWO)
    shared = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    hosts = [Torchrun(config, env=shared | {"NODE_RANK": rank}) for rank in ("0", "1")]
    ends = [host.end() for host in hosts]
    assert [status for status, _, _ in ends] == [Exit.OK, Exit.OK], ends
    assert "step 10/10" in ends[0][1] and "step" not in ends[1][1].split("no mistakes found")[1]
    assert [record["step"] for record in hosts[0].steps()] == list(range(1, 11))


@pytest.mark.slow
def test_hosts_with_different_secrets_are_named(tmp_path: Path) -> None:
    """As of hosts that share no folder, or of another user's rank."""
    config = job_config(tmp_path, GPT, **TWO)
    shared = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    hosts = [
        Torchrun(
            config,
            "comm.timeout_s=30",
            "launch.start_timeout_s=30",
            env=shared | {"NODE_RANK": rank, "MEGASCALE_JOB_SECRET": rank * 32},
        )
        for rank in ("0", "1")
    ]
    _, _, err = hosts[1].end()
    assert re.search(r"the job's store at 127.0.0.1:\d+  it hung up: it has another secret than this process", err), err
    _, _, err = hosts[0].end()
    assert "without the job's secret was refused at the job's store" in err
    assert "for rank 1 at the start of the job; the store has refused a process without the job's secret" in err
    assert not hosts[0].steps()


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [False, True], ids=["torchrun", "all"])
def test_sigterm_saves_and_the_same_line_goes_on(to_all: bool, tmp_path: Path) -> None:
    """Also where the ranks have got it before torchrun forwards it."""
    config = job_config(tmp_path, GPT, **TWO, train__steps=100_000, checkpoint__every=100_000)
    job = Torchrun(config, env={"NPROC": "2"})
    job.wait_for_step(2)
    job.signal_all(signal.SIGTERM) if to_all else job.signal(signal.SIGTERM)
    _, out, _ = job.end()
    step = int(re.findall(r"stopped by a signal after step (\d+)", out)[0])
    assert f"step-{step:08d}" in out
    again = Torchrun(config, f"train.steps={step + 2}", env={"NPROC": "2"})
    status, out, err = again.end()
    assert status == Exit.OK, err
    assert f"step-{step:08d}: step {step}," in out
    assert [record["step"] for record in again.steps()] == list(range(1, step + 3))


@pytest.mark.slow
def test_a_ranks_own_error_comes_first_and_is_the_root_cause(tmp_path: Path) -> None:
    env = with_planted(tmp_path / "site", 1, "ValueError('planted in rank one')")
    status, _, err = Torchrun(job_config(tmp_path, GPT, **TWO, train__steps=1000), env=env | {"NPROC": "2"}).end()
    host = socket.gethostname()
    assert status == Exit.UNCLASSIFIED
    assert err.startswith(f"rank 1 of 2 on {host}:\nTraceback"), err
    cause = err[err.index("Root Cause") :]
    assert f"rank 1 of 2 on {host}: ValueError: planted in rank one" in cause
    assert err.index("planted in rank one") < err.index(f"rank 0 of 2 on {host}: lost another rank")


@pytest.mark.slow
def test_a_killed_rank_is_the_root_cause(tmp_path: Path) -> None:
    job = Torchrun(job_config(tmp_path, GPT, **TWO, train__steps=100_000), env={"NPROC": "2"})
    job.wait_for_step(2)
    os.kill(job.ranks()[1], signal.SIGKILL)
    killed = time.monotonic()
    _, _, err = job.end()
    assert time.monotonic() - killed < 30
    assert re.search(r"Root Cause.*\n.*\n.*\n.*\n  rank      : 1 .*\n  exitcode  : -9", err), err


@pytest.mark.slow
def test_killed_ranks_are_restarted(tmp_path: Path) -> None:
    """Five of five: torchrun restarts all ranks, and the run goes on from its newest checkpoint."""
    steps = TWO | {"train__steps": 40, "checkpoint__every": 2}
    expected = curve(finish(job_config(tmp_path / "undisturbed", GPT, **steps)))
    job = Torchrun(job_config(tmp_path / "killed", GPT, **steps), env={"NPROC": "2", "PET_MAX_RESTARTS": "5"})
    for restart in range(5):
        job.wait_for_step(4 + 6 * restart)
        os.kill(job.ranks()[restart % 2], signal.SIGKILL)
        time.sleep(1.0)  # the other rank ends
    status, _, err = job.end()
    assert status == Exit.OK, err
    last = {record["step"]: record for record in job.steps()}
    assert curve(list(last.values())) == expected


@pytest.mark.slow
def test_restarted_ranks_do_not_begin_anew_where_the_run_is_lost(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **TWO, train__steps=100_000, checkpoint__every=2)
    job = Torchrun(config, env={"NPROC": "2", "PET_MAX_RESTARTS": "2"})
    job.wait_for_step(4)
    job.folder.rename(tmp_path / "away")
    os.kill(job.ranks()[1], signal.SIGKILL)
    status, out, err = job.end()
    assert status != Exit.OK
    assert f"the run's folder {job.folder} is lost" in err and "-> mount it or put it back" in err
    assert out.count("step 1/") == 1 and not job.folder.exists()
    (tmp_path / "away").rename(job.folder)
    again = Torchrun(config, "train.steps=8", env={"NPROC": "2"})
    assert again.end()[0] == Exit.OK and again.steps()[-1]["step"] == 8


@pytest.mark.slow
def test_ranks_die_with_torchrun(tmp_path: Path) -> None:
    job = Torchrun(job_config(tmp_path, GPT, **TWO, train__steps=100_000), env={"NPROC": "2"})
    job.wait_for_step(1)
    ranks = list(job.ranks().values())
    assert len(ranks) == 2
    job.signal(signal.SIGKILL)
    job.process.communicate()
    deadline = time.monotonic() + 30
    while any(lives(pid) for pid in ranks):
        assert time.monotonic() < deadline, "ranks outlive torchrun"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("overrides", "env", "message"),
    [
        (["model.hiden_size=8"], {"NPROC": "2"}, "did you mean 'hidden_size'?"),
        ([], {"NPROC": "3"}, "3 processes are not a multiple of"),
        ([], {"NPROC": "1", "NNODES": "2"}, "with NNODES=2, the name or address of host 0"),
    ],
)
def test_mistakes_are_found_before_any_process_starts(
    overrides: list[str], env: dict[str, str], message: str, tmp_path: Path
) -> None:
    status, _, err = Torchrun(job_config(tmp_path, GPT, **TWO), *overrides, env=env).end()
    assert status == Exit.CONFIG, err
    assert message in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_no_host_of_that_name(tmp_path: Path) -> None:
    """A rank started by hand, or in a job whose first host cannot be reached by name."""
    config = job_config(tmp_path, GPT, **TWO)
    command = [sys.executable, "-m", "megascale", "train", str(config)]
    for master, message in (({}, "not set"), ({"MASTER_ADDR": "no-such-host.invalid"}, "'no-such-host.invalid': ")):
        env = environment() | {"RANK": "1", "WORLD_SIZE": "2"} | master
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == Exit.CONFIG
        assert f"MASTER_ADDR: {message}" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"NNODES": "two"}, "NNODES: 'two' is not a whole number from 1 to"),
        ({"NNODES": "0"}, "NNODES: '0' is not a whole number from 1 to"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK: '2' is not a whole number from 0 to 1"),
        ({"NODE_RANK": "-1"}, "NODE_RANK: '-1' is not a whole number from 0 to 0"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: '70000' is not a whole number from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT: '0' is not a whole number from 1 to 65535"),
        ({"NPROC": "2x"}, "NPROC: '2x' is not a whole number from 1 to"),
    ],
)
def test_variables_of_the_script_are_checked(env: dict[str, str], message: str) -> None:
    result = subprocess.run(
        [str(SCRIPT), "config.toml"], env=environment() | env, capture_output=True, text=True, check=False
    )
    assert result.returncode == Exit.CONFIG
    assert message in result.stderr and len(result.stderr.splitlines()) == 1


def test_usage_without_arguments() -> None:
    result = subprocess.run([str(SCRIPT)], capture_output=True, text=True, check=False)
    assert result.returncode == Exit.CONFIG
    assert result.stderr.startswith("usage: launch/torchrun.sh CONFIG") and "MASTER_ADDR" in result.stderr
