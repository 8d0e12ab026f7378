"""The benchmarks of the driver: the table of replayed failures, and the cost of heartbeats."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from lab import LAB


def run(command: str, *arguments: str) -> str:
    words = [sys.executable, LAB, command, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_replays_print_a_table_and_json() -> None:
    arguments = ("--gpus", "256", "--days", "30", "--mix", "llama3")
    assert re.search(r"\| 256 \| \d+ \| \d+ \| \d+ \| \d+\.\d\d% \| ", run("replay", *arguments))
    (result,) = json.loads(run("replay", *arguments, "--json"))["llama3"]
    assert result["effective_share"] > 0.9
    table = run("replay", *arguments, "--sensitivity", "--seeds", "2")
    assert "256 GPUs" in table
    for words in (
        "80% of hang verdicts right",
        "restarts in twice the time",
        "half the time between failures",
        "no spares",
    ):
        assert re.search(rf"\| {words} \| \d+\.\d\d%", table)


@pytest.mark.slow
def test_simulated_agents_beat_to_one_driver() -> None:
    out = run("driver", "--agents", "8", "--ranks", "4", "--seconds", "2")
    assert re.search(r"8 agents, 32 ranks: [6-9] heartbeats a second", out)
    assert re.search(r"driver: \d+\.\d% of a core, \d+ us a heartbeat; run", out)
