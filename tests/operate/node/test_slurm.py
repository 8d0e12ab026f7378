"""Under Slurm: where ranks are and meet, and whole jobs of launch/slurm.sbatch on a real cluster of one node."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import Exit
from megascale.core.files import lock_folder
from megascale.core.rank import rank_from_environment, rendezvous_endpoint
from tests.jobs import job_config
from tests.operate.node.slurm import Slurm, missing
from tests.runs import GPT

SCRIPT = Path(__file__).parents[3] / "launch" / "slurm.sbatch"
FOUR = {"parallel__tp": 2, "parallel__pp": 2, "train__steps": 100_000, "train__precision": "fp32"}
SECONDS = 120

BATCH = {"SLURM_JOB_ID": "1207", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = BATCH | {
    "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}  # fmt: skip


def test_a_task_of_a_step_is_a_rank() -> None:
    rank = rank_from_environment(STEP)
    assert rank is not None and (rank.rank, rank.world_size, rank.local_rank) == (5, 8, 1)


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "1207", "SLURM_NTASKS": "8"},  # salloc's shell on the login node
        BATCH,
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
    ],
)
def test_a_shell_of_a_job_is_no_rank(env: dict[str, str]) -> None:
    assert rank_from_environment(env) is None


def test_torchrun_in_a_step_says_the_rank() -> None:
    rank = rank_from_environment(STEP | {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "4"})
    assert rank is not None and (rank.rank, rank.world_size, rank.local_rank) == (9, 16, 4)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("node[07-08,12],other", "node07"),
        ("node[12,14-15]-ib", "node12-ib"),
        ("rack[03-04,7]node[1-2],login", "rack03node1"),
    ],
)
def test_ranks_meet_on_the_first_host(nodes: str, first: str) -> None:
    assert rendezvous_endpoint(STEP | {"SLURM_STEP_NODELIST": nodes}) == (first, 22073)


def test_the_environment_says_where_to_meet() -> None:
    assert rendezvous_endpoint(STEP | {"MASTER_ADDR": "ib7", "MASTER_PORT": "4000"}) == ("ib7", 4000)
    assert rendezvous_endpoint({"MASTER_ADDR": "ib7"}) == ("ib7", 29500)
    assert rendezvous_endpoint(BATCH) is None


def test_the_status_of_a_job_is_that_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    def status() -> tuple[str, str]:
        command = [sys.executable, "-m", "megascale.operate.node.rank_ends", str(tmp_path), "143"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        return result.stdout.strip(), result.stderr.strip()

    error = {"host": "h", "what": "no text", "exit_status": 3, "peer_was_lost": False}
    assert status() == ("143", "")
    lost = error | {"rank": 0, "time": 1.0, "exit_status": 1, "peer_was_lost": True}
    (tmp_path / "rank-0.error.json").write_text(json.dumps(lost))
    assert status() == ("143", "")
    (tmp_path / "rank-5.error.json").write_text(json.dumps(error | {"rank": 5, "time": 2.0}))
    assert status() == ("3", "megascale: rank 5 on h failed: no text")


def test_the_script_outside_a_job() -> None:
    result = subprocess.run(["bash", str(SCRIPT), "a.toml"], env=clean(), capture_output=True, text=True, check=False)
    assert result.returncode == Exit.CONFIG
    assert result.stderr.startswith("usage: sbatch ")


def clean() -> dict[str, str]:
    """This process's environment, without a job's variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := missing():
        pytest.skip(reason)
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


class Submitted:
    """A job of launch/slurm.sbatch with four tasks, submitted in the folder of its configuration."""

    def __init__(self, slurm: Slurm, config: Path, *overrides: str) -> None:
        self.slurm = slurm
        self.folder = config.parent
        (self.folder / "runs").mkdir(exist_ok=True)
        env = {"PYTHON": sys.executable}
        self.id = slurm.submit("--ntasks=4", str(SCRIPT), config.name, *overrides, folder=self.folder, env=env)

    def output(self) -> str:
        path = self.folder / "runs" / f"slurm-{self.id}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, pattern: str) -> str:
        """The first group of a pattern's match in the output, once there is one."""
        deadline = time.monotonic() + SECONDS
        while not (match := re.search(pattern, self.output())):
            assert time.monotonic() < deadline and "ended with" not in self.output(), self.output()
            time.sleep(0.1)
        return match.group(1)

    def end(self) -> tuple[str, str]:
        """Wait for the end of the job and its output; return state and exit code."""
        return self.slurm.end(self.id)

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks by their number."""
        found = {}
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = dict(v.split("=", 1) for v in environ.read_text().split("\0") if "=" in v)
                command = (environ.parent / "cmdline").read_text()
            except (OSError, UnicodeDecodeError):
                continue
            if variables.get("SLURM_JOB_ID") == self.id and "SLURM_STEP_ID" in variables and "train" in command:
                found[int(variables["SLURM_PROCID"])] = int(environ.parent.name)
        return found


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "test" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


STEPS = r"0: step (\d+)/"


@pytest.mark.slow
def test_a_run_is_stopped_twice_and_goes_on_each_time(slurm: Slurm, tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **FOUR, checkpoint__every=100_000)
    stops = {"scancel --signal=TERM": "FAILED", "scancel": "CANCELLED"}
    last = 0
    for stop, state in stops.items():
        job = Submitted(slurm, config)
        first = int(job.wait_for(STEPS))
        assert first == last + 1
        job.wait_for(f"(step {last + 3})/")
        slurm.ask(*stop.split(), job.id)
        assert job.end() == (state, "143:0"), job.output()
        last = int(job.wait_for(r"0: stopped by a signal after step (\d+)"))
        assert re.search(rf"0: saved \S+step-{last:08d}: ", job.output())
        assert job.output().rstrip().endswith("ended with status 143")
        assert [record["step"] for record in steps(tmp_path)] == list(range(1, last + 1))
    job = Submitted(slurm, config, f"train.steps={last + 2}")
    assert job.end() == ("COMPLETED", "0:0"), job.output()
    assert f"step-{last:08d}: step {last}," in job.output()
    assert [record["step"] for record in steps(tmp_path)] == list(range(1, last + 3))


@pytest.mark.slow
def test_a_mistake_ends_before_any_task_starts(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, job_config(tmp_path, GPT, **FOUR), "model.hiden_size=8", "parallel.tp=3")
    assert job.end() == ("FAILED", f"{Exit.CONFIG:d}:0")
    assert "did you mean 'hidden_size'?" in job.output() and "\n3 problems\n" in job.output()
    assert "srun" not in job.output() and not (tmp_path / "runs" / "test").exists()


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_job_ends(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, job_config(tmp_path, GPT, **FOUR))
    job.wait_for(STEPS)
    ranks = job.ranks()
    assert sorted(ranks) == [0, 1, 2, 3]
    os.kill(ranks[2], signal.SIGKILL)
    killed = time.monotonic()
    state, code = job.end()
    assert time.monotonic() - killed < 30
    assert (state, code) == ("FAILED", "137:0")
    output = job.output()
    assert re.search(r"srun: error: \S+: task 2: Killed", output), output
    lost = re.search(r"\d: rank \d of 4 on \S+: lost another rank", output)
    assert lost is None or output.index("task 2: Killed") < lost.start()


@pytest.mark.slow
def test_a_job_ends_with_the_status_of_the_rank_that_failed_first(slurm: Slurm, tmp_path: Path) -> None:
    """srun's own status is the highest: 143, of ranks that srun ended."""
    config = job_config(tmp_path, GPT, **FOUR)
    with lock_folder(tmp_path / "runs" / "test", "another job"):  # `check` does not look at locks
        job = Submitted(slurm, config)
        assert job.end() == ("FAILED", f"{Exit.CONFIG:d}:0"), job.output()
    last = job.output().splitlines()
    assert re.match(r"megascale: rank 0 on \S+ failed: .*a job trains in this folder already", last[-3]), last
    assert "Traceback" not in job.output()
    assert not (tmp_path / "runs" / f"slurm-{job.id}.errors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["salloc --ntasks=4", "srun --ntasks=1"])
def test_a_shell_in_a_job_starts_its_own_ranks(command: str, slurm: Slurm, tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **FOUR)
    train = [sys.executable, "-m", "megascale", "train", str(config), "train.steps=3"]
    result = subprocess.run(
        [*command.split(), *train], env=slurm.env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert result.returncode == Exit.OK, result.stderr
    assert "= 4 ranks" in result.stdout and (tmp_path / "runs" / "test" / "logs" / "rank-3.log").exists()
