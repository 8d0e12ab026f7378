"""launch/slurm_fault.sbatch on a real cluster: nodes of an allocation are lost while a job trains."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import curve, finish, job_config
from tests.operate.driver.scheduler.test_slurm import SCRIPT
from tests.operate.node.slurm import Slurm, missing
from tests.runs import GPT

pytestmark = pytest.mark.slow

SECONDS = 300
TWO = {
    "parallel__dp": 2, "parallel__zero": 1, "train__precision": "fp32", "train__steps": 60,
    "checkpoint__every": 10, "checkpoint__in_memory_every": 1, "checkpoint__replicate": True,
    "fault__agent_grace_s": 8.0,
}  # fmt: skip


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if reason := missing():
        pytest.skip(reason)
    with Slurm(tmp_path / "cluster", nodes=4, slurmd_timeout=10) as cluster:
        yield cluster


class Training:
    """A job of two nodes, and of spares, in an allocation of all of them."""

    def __init__(self, slurm: Slurm, folder: Path, spares: int = 1, **overrides: object) -> None:
        self.slurm = slurm
        self.folder = folder / "job"
        config = job_config(self.folder, GPT, **TWO, **overrides, checkpoint__in_memory_dir=str(folder / "memory"))
        words = [f"--nodes={2 + spares}", "--time=30", "--job-name=training", str(SCRIPT), config.name, "--nodes", "2"]
        env = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        self.first = slurm.submit(*words, "--spares", str(spares), folder=self.folder, env=env)

    def output(self) -> str:
        texts = sorted((self.folder / "runs").glob("slurm-*.out")), sorted((self.folder / "runs").rglob("agent-*.log"))
        return "\n".join(f"{path.name}: {path.read_text()}" for paths in texts for path in paths)

    def steps(self) -> list[dict[str, Any]]:
        path = self.folder / "runs" / "test" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for line in lines if line.endswith("}") and "loss" in (record := json.loads(line))]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind in the log of incidents."""
        path = self.folder / "runs" / "test" / "incidents.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()]
        return [event for event in events if event["event"] == kind]

    def incidents(self) -> list[dict[str, Any]]:
        return [event["incident"] for event in self.events("incident")]

    def wait_for(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: any(record["step"] >= step for record in self.steps()))

    def wait_for_end(self) -> None:
        """Return when neither the job nor a successor is queued or runs."""
        self.wait_for(lambda: not self.slurm.ask("squeue", "-h", "-n", "training").strip())


def undisturbed(tmp_path: Path) -> list[tuple[int, float, float]]:
    """The loss curve without driver, faults and copies in memory."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "job" / "runs").mkdir(parents=True)
    plain = {name: value for name, value in TWO.items() if not name.startswith("checkpoint")}
    return curve(finish(job_config(tmp_path / "undisturbed", GPT, **plain)))


def test_a_dead_node_is_replaced_and_the_job_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)
    job = Training(slurm, tmp_path)
    job.wait_for_step(15)
    slurm.kill_node("n1")
    job.wait_for(lambda: slurm.state(job.first).get("JobState") != "RUNNING" or curve(job.steps()) == expected)
    slurm.restart_node("n1")
    assert slurm.end(job.first, SECONDS) == ("COMPLETED", "0:0"), job.output()
    assert curve(job.steps()) == expected
    (incident,) = job.incidents()
    assert (incident["class"], incident["culprit"]["nodes"], incident["action"]["kind"]) == ("node", ["n1"], "replace")
    (recovered,) = job.events("recovered")
    assert recovered["steps_lost"] <= 1, "from replicas of the copies in memory"
    job.wait_for_end()
    assert "takes over when this one is lost" in job.output()


def test_without_a_spare_the_job_goes_on_with_fewer_ranks(slurm: Slurm, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)
    job = Training(slurm, tmp_path, spares=0, fault__shrink=True)
    job.wait_for_step(15)
    slurm.kill_node("n1")
    job.wait_for(lambda: slurm.state(job.first).get("JobState") != "RUNNING" or len(job.steps()) == len(expected))
    slurm.restart_node("n1")
    assert slurm.end(job.first, SECONDS) == ("COMPLETED", "0:0"), job.output()
    for ours, theirs in zip(curve(job.steps()), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert job.incidents()[-1]["action"]["kind"] == "shrink", job.incidents()
    job.wait_for_end()


def test_the_successor_goes_on_when_the_first_node_is_lost(slurm: Slurm, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)
    job = Training(slurm, tmp_path)
    job.wait_for_step(15)
    slurm.kill_node("n0")
    job.wait_for_end()
    assert curve(job.steps()) == expected, job.output()
    assert slurm.state(job.first)["JobState"] == "CANCELLED", "by an agent, once Slurm had given up the node"
