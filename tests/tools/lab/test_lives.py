"""`tools/lab lives`: a job whose folder is renamed goes on from its copies in memory, or ends with 93."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab import LAB

TOOL = [sys.executable, LAB, "lives"]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "what"), [(16, "with copies in memory"), (2, "without copies in memory")])
def test_a_job_outlives_its_folder_or_ends_for_storage(seed: int, what: str, tmp_path: Path) -> None:
    command = [*TOOL, "folder", "--rounds", "1", "--seed", str(seed), "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| folder |"))
    assert f"folder renamed, {what}; SIGKILL of a rank" in row and row.endswith("| none |")


def test_an_unknown_scenario_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([*TOOL, "flood"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no scenario flood  -> one of folder" in done.stderr
