"""`make chaos`: each injected fault but the slow rank becomes an incident with its culprit, and the job ends well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab import LAB
from megascale.operate.driver.incidents import LOG_FILE, Incident, read_history


@pytest.mark.slow
def test_the_demonstration_names_each_culprit_and_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, LAB, "chaos", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = tmp_path.glob("chaos-*/")
    incidents: list[Incident] = list(read_history(run / LOG_FILE).incidents.values())
    assert [(one.class_, one.culprit.ranks) for one in incidents] == [
        ("process", (3,)),
        ("hang", (0,)),
        ("hang", (2,)),
    ]
    assert all(one.recovery_s is not None and one.steps_lost is not None for one in incidents)
    for one in incidents:
        assert f"{one.class_:10}{one.culprit!s:18}{one.action.kind:10}" in done.stdout
