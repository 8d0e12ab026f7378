"""The first rank to leave is named, whatever its status, under each launcher; and launchers that are stopped."""

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
from tests.jobs import Job, heed_signals, job_config
from tests.operate.node.test_torchrun import Torchrun, environment, free_port
from tests.runs import GPT

TWO = {"parallel__tp": 2, "train__steps": 100_000, "train__precision": "fp32"}
HOST = socket.gethostname()

LEAVE = """
import os, sys
if os.environ.get("RANK") == "{rank}":
    import megascale.train.scheduled_gc as gc
    def leave(self, run, result):
        if run.progress.step == 3:
            {how}
    gc.ScheduledGC.step_ends = leave
"""


def with_leaving(folder: Path, rank: int, how: str) -> dict[str, str]:
    """Return an environment in which a rank leaves after its third step, as a library may make it."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(LEAVE.format(rank=rank, how=how))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parents[3]}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "how", "message"),
    [
        (1, "os._exit(0)", "ended with status 0 and no error, before the job's end"),
        (0, "os._exit(0)", "ended with status 0 and no error"),
        (1, "os._exit(143)", "ended with status 143 and no error"),
        (1, "sys.exit(0)", "SystemExit: 0"),
    ],
)
def test_our_launcher_names_the_first_to_leave(rank: int, how: str, message: str, tmp_path: Path) -> None:
    status, _, err = Job(job_config(tmp_path, GPT, **TWO), env=with_leaving(tmp_path / "site", rank, how)).end()
    assert status not in (Exit.OK, None), err
    assert f"megascale: rank {rank} of 2 on {HOST} failed: {message}" in err, err


@pytest.mark.slow
def test_a_rank_that_a_signal_ends_alone_at_the_start_is_named(tmp_path: Path) -> None:
    """The other rank would wait for it until the timeout."""
    job = Job(job_config(tmp_path, GPT, **TWO), env={"PYTHONPATH": str(tmp_path)})
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('RANK') == '0':\n"
        "    import megascale.comm.meeting as meeting\n"
        "    meeting.open_store = lambda *args: time.sleep(600)\n"
    )
    while not (log := job.folder / "logs" / "rank-1.log").exists() or "has waited" not in log.read_text():
        assert job.process.poll() is None
        time.sleep(0.1)
    os.kill(job.ranks()[1], signal.SIGTERM)
    status, _, err = job.end()
    assert status == Exit.UNCLASSIFIED
    assert f"megascale: rank 1 of 2 on {HOST} failed: killed by SIGTERM\n" in err
    assert "  | megascale: received SIGTERM, which nobody of this job sent: this rank ends\n" in err


@pytest.mark.slow
def test_under_torchrun_the_others_name_a_rank_that_left_with_status_0(tmp_path: Path) -> None:
    env = with_leaving(tmp_path / "site", 1, "os._exit(0)") | {"NPROC": "2"}
    status, _, err = Torchrun(job_config(tmp_path, GPT, **TWO), env=env).end()
    assert status == Exit.UNCLASSIFIED
    cause = err[err.index("Root Cause") :]
    assert re.search(r"rank 0 of 2 on \S+: lost another rank: .* of group \S+ lost rank 1: ", cause), cause
    assert re.search(r": the cause: the process of rank 1 has ended\. rank 0 of 2 on ", cause), cause


@pytest.mark.slow
def test_ranks_of_a_host_whose_torchrun_is_killed_are_named_on_the_other_host(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **TWO)
    shared = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    hosts = [Torchrun(config, env=shared | {"NODE_RANK": rank}) for rank in ("0", "1")]
    hosts[0].wait_for_step(2)
    hosts[1].signal(signal.SIGKILL)
    killed = time.monotonic()
    status, _, err = hosts[0].end()
    hosts[1].end()
    assert status == Exit.UNCLASSIFIED and time.monotonic() - killed < 60
    cause = err[err.index("Root Cause") :]
    assert re.search(r"rank 0 of 2 on \S+: lost another rank: .* lost rank 1: .*; the process of rank 1", cause), cause


@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again_and_the_run_resumes(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **TWO | {"train__steps": 60}, checkpoint__every=5)
    job = Torchrun(config, env={"NPROC": "2", "PET_MAX_RESTARTS": "1"})
    job.wait_for_step(7)
    os.kill(job.ranks()[1], signal.SIGKILL)
    status, out, err = job.end()
    assert status == Exit.OK, err
    assert "step 60/60" in out and "/step-000000" in out
    assert [record["step"] for record in job.steps()] == list(range(1, 61))


@pytest.mark.slow
def test_a_launcher_that_stands_still_for_a_moment_goes_on(tmp_path: Path) -> None:
    job = Job(job_config(tmp_path, GPT, **TWO | {"train__steps": 60}))
    job.wait_for_step(1)
    job.signal(signal.SIGSTOP)
    job.wait_for_step(5)
    job.signal(signal.SIGCONT)
    status, _, err = job.end()
    assert status == Exit.OK and err == ""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, Exit.STOPPED), (signal.SIGINT, Exit.INTERRUPTED)])
def test_a_rank_that_nobody_joins_says_so_and_hears_a_signal(number: int, status: int, tmp_path: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "megascale", "train", str(job_config(tmp_path, GPT, **TWO))]
    with subprocess.Popen(
        command, env=environment() | place, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.send_signal(number)
        rest = process.stderr.read()
    awaited = f"for rank 1, at 127.0.0.1:{place['MASTER_PORT']}; it is a rank by RANK=0 and WORLD_SIZE=2"
    assert re.fullmatch(rf"rank 0 of 2 on {HOST}: has waited 1\d s {awaited}\n", line), line
    assert rest == f"rank 0 of 2 on {HOST}: stopped by {signal.Signals(number).name} before the first step\n"
    assert process.returncode == status
