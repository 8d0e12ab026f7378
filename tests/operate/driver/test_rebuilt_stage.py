"""A job of `megascale launch` that loses the node of its middle stage, of which nobody has a copy."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest

from megascale.operate.show.diagnosis import diagnose
from megascale.operate.show.diagnosis_text import diagnosis_text
from megascale.operate.show.html_report import render_report
from megascale.operate.show.last_states import read_last_states
from megascale.operate.show.run_reader import RunReader
from tests.operate.driver.launched import LaunchedJob, launch_config

PIPELINE = {"parallel__dp": 1, "parallel__pp": 3, "model__num_layers": 3, "train__steps": 40}


@pytest.mark.slow
@pytest.mark.parametrize("least", [5, 0])
def test_a_lost_stage_is_rebuilt(least: int, tmp_path: Path) -> None:
    config = launch_config(tmp_path, fault__rebuild_stage=least, **PIPELINE)
    job = LaunchedJob(config, "--nodes", "3", "--spares", "1")
    job.wait_for_step(10)
    before = {record["step"]: record["loss"] for record in job.steps()}
    os.kill(job.pid("agent", node="node1"), signal.SIGKILL)
    job.wait_for_recovery()
    status, output, _ = job.end()
    assert status == 0, output
    lost = job.history.incidents[1]
    assert (lost.class_, lost.culprit.nodes, lost.action.kind) == ("node", ("node1",), "replace")
    assert lost.resumed_step is not None
    if not least:
        assert lost.resumed_step == 0 and len(job.history.incidents) == 1, "the job begins anew"
        return
    assert lost.resumed_step >= 10 and lost.steps_lost <= 1, output
    rebuilt = job.history.incidents[2]
    what = "state of lost pipeline stages was rebuilt, stage 1 as "
    assert rebuilt.class_ == "alert" and rebuilt.what.startswith(what)
    assert rebuilt.what.endswith(f"it is of step {lost.resumed_step}")
    assert f"WARNING: step {lost.resumed_step}: {what}" in output
    view = RunReader(job.folder).read()
    assert rebuilt.what in diagnosis_text(diagnose(view, read_last_states(view))) and rebuilt.what in render_report(
        view, None, ""
    )
    after = {record["step"]: record["loss"] for record in job.steps()}
    assert after.keys() == set(range(1, 41)) and all(map(math.isfinite, after.values()))
    assert all(after[step] == before[step] for step in range(1, 10)), "the run has gone on"
    assert after[lost.resumed_step + 1] < 1.2 * after[lost.resumed_step]
