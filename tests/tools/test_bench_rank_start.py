"""The benchmark of a rank's start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_start_is_measured_to_its_imports_and_to_its_first_save() -> None:
    words = [sys.executable, "tools/bench/rank_start.py", "--runs", "1"]
    out = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = re.findall(r": (imports|three steps): (\d+\.\d\d) s of CPU time, (\d+) MiB, (\d+) modules", out)
    assert [what for what, *_ in found] == ["imports", "three steps"]
    imports, steps = ([float(number) for number in numbers] for _, *numbers in found)
    assert all(one <= other for one, other in zip(imports[1:], steps[1:], strict=True))
