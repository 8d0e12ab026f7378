"""`megascale launch` on hosts of a testbed: a host whose link is cut is replaced."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.testbed import INTERFACE, HostLink, Testbed, export_testbed
from tests.jobs import curve, job_config
from tests.operate.driver.scheduler.test_slurm_launch import TWO, undisturbed
from tests.runs import GPT
from tests.tools.lab.test_testbed import missing

SECONDS = 240


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_host_without_a_link_is_replaced(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)
    config = job_config(tmp_path / "job", GPT, **TWO, checkpoint__in_memory_dir=str(tmp_path / "memory"))
    run, output = tmp_path / "job" / "runs" / "test", tmp_path / "output"
    launch = [sys.executable, "-m", "megascale", "launch", str(config), "--nodes", "2", "--spares", "1"]

    def steps() -> list[dict[str, float]]:
        path = run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for line in lines if line.endswith("}") and "loss" in (record := json.loads(line))]

    def wait_for(done: Callable[[], object]) -> None:
        deadline = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)

    with Testbed(3, HostLink()) as testbed, open(output, "w") as out:
        env = export_testbed(testbed) | {"OMP_NUM_THREADS": "1"}
        command = [*launch, "--scheduler", "testbed"]
        job = testbed.start_command(0, command, env, stdout=out, stderr=subprocess.STDOUT)
        wait_for(lambda: len(steps()) >= 10 or job.poll() is not None)
        down = ["ip", "link", "set", INTERFACE, "down"]
        testbed.call_on_host(1, lambda: subprocess.run(down, check=True))
        wait_for(lambda: job.poll() is not None)
    assert job.returncode == 0, output.read_text()
    assert curve(steps()) == expected
    events = [json.loads(line) for line in (run / "incidents.jsonl").read_text().splitlines()]
    incidents = [event["incident"] for event in events if event["event"] == "incident"]
    assert [incident["culprit"]["nodes"] for incident in incidents] == [["node1"]], incidents
    assert incidents[0]["action"]["kind"] == "replace"
    (recovered,) = [event for event in events if event["event"] == "recovered"]
    assert recovered["steps_lost"] <= 1, "from replicas of the copies in memory"
