"""A rank that dies or stops on a GPU job ends the job soon, and is the one that is named."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.gpu.conftest import Figure
from tests.jobs import Job, job_config
from tests.runs import GPT

pytestmark = pytest.mark.gpu(2)

LONG = {"train__precision": "bf16", "train__steps": 100_000, "parallel__pp": 2}

NEVER = r"never (joined \w+ \d+|(sent|received) the message) of group \S+"
"""What the launcher says of a rank that others wait for."""


def started(folder: Path, *overrides: str) -> Job:
    """A job that has trained some steps."""
    job = Job(job_config(folder, GPT, **LONG), *overrides)
    job.wait_for_step(5)
    return job


def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path, figure: Figure) -> None:
    job = started(tmp_path)
    os.kill(job.ranks()[1], signal.SIGKILL)
    begun = time.monotonic()
    status, _, err = job.end()
    figure("seconds until the end", time.monotonic() - begun, "s", most=20)
    assert status != 0
    assert "rank 1 of 2" in err and "SIGKILL" in err


@pytest.mark.timeout(450)
@pytest.mark.gpu(2, only=True)
def test_a_stopped_rank_is_named_by_the_flight_recorder(tmp_path: Path, figure: Figure) -> None:
    """After 20 s rank 0's watchdog asks for the dumps, and ends it a minute later."""
    job = started(tmp_path, "comm.timeout_s=20")
    stopped = job.ranks()[1]
    os.kill(stopped, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        status, _, err = job.end(seconds=300)
    finally:
        if job.process.poll() is None:
            os.kill(stopped, signal.SIGCONT)
    figure("seconds until the end", time.monotonic() - begun, "s", most=120)
    assert status != 0
    assert re.search(rf"^megascale: rank 1 of 2 on \S+ failed: .*{NEVER}", err, re.MULTILINE), err
