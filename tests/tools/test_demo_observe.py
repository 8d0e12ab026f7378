"""`make demo-observe`: the commands name the slow rank, the slow link and the rank that hangs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from demo_observe import HUNG_RANK, LINK, SLOW_RANK, faults, verdicts
from megascale.config.injection import parse_injection

ROOT = Path(__file__).resolve().parents[2]


def test_every_fault_has_a_verdict() -> None:
    assert len(parse_injection("; ".join(faults(30))).faults) == 3
    found = [{"kind": "compute", "ranks": [SLOW_RANK]}, {"kind": "link", "ranks": list(LINK)}]
    hang = {"verdict": {"ranks": [HUNG_RANK]}}
    assert list(verdicts(found, hang).values()) == [True, True, True]
    assert list(verdicts(found[:1], hang).values()) == [True, False, True]
    assert list(verdicts([{"kind": "host", "ranks": [SLOW_RANK]}], {}).values()) == [False, False, False]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_demonstration_names_all_three(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "demo_observe.py"), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    assert f"HANGS: rank {HUNG_RANK} " in out
    assert re.search(rf"^rank {SLOW_RANK}: computes slowly, since step", out, re.MULTILINE)
    assert re.search(rf"^link rank {LINK[0]} - rank {LINK[1]}: messages are slow", out, re.MULTILINE)
    assert re.search(rf"^ *0 +{SLOW_RANK} +\S+ +0 ", out, re.MULTILINE)  # slowest-ranks
    (run,) = tmp_path.glob("demo-observe-*/")
    assert f"rank {SLOW_RANK}: computes slowly" in (run / "report.html").read_text()
    assert (run / "waits.svg").read_text().startswith("<svg")
