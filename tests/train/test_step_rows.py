"""The rows of steps: one for each step, with what happened in it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from megascale.core.rank import Rank
from megascale.record.layout import TAGS, Phase
from megascale.train.run import Run, StepResult
from megascale.train.step_rows import StepRows
from tests.recorded_events import drain
from tests.runs import GPT, build_run, config_of, settings


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return build_run(Rank(0, 1, 0, "host"), config_of(settings(GPT, tmp_path), tmp_path, world=1))


def result(loss: float) -> StepResult:
    return StepResult(loss, 2 * loss, 128, 1e-3, {})


def written(run: Run) -> list[tuple[int, float, set[str]]]:
    """(step, loss, tags) of the rows."""
    steps = drain(run.mesh.recorder)[0].steps
    return [
        (int(s["step"]), float(s["loss"]), {tag for bit, tag in enumerate(TAGS) if s["tags"] >> bit & 1}) for s in steps
    ]


def test_a_step_is_tagged_with_what_took_its_time(run: Run) -> None:
    recorder = run.mesh.recorder
    with StepRows(run) as rows:
        for step, phase in enumerate((None, None, Phase.EVALUATION, Phase.CHECKPOINT, Phase.GC, None), 1):
            rows.begin(step)
            rows.end(result(step / 8))
            if phase is not None:
                recorder.record_activity(phase, 0.0, 1.0)
        rows.begin(7)
        recorder.record_activity(Phase.DATA, 0.0, 1.0, until=1.0)
        rows.end(result(7 / 8))
        rows.begin(8)
        recorder.record_activity(Phase.DATA, 0.0, 1.0)
        rows.end(result(1.0))
    assert written(run) == [
        (1, 0.125, {"first step"}),
        (2, 0.25, set()),
        (3, 0.375, {"evaluation"}),
        (4, 0.5, {"checkpoint"}),
        (5, 0.625, {"gc"}),
        (6, 0.75, set()),
        (7, 0.875, set()),
        (8, 1.0, {"data"}),
    ]


def test_the_profiled_step_and_the_next_are_tagged_on_all_ranks(run: Run) -> None:
    run.config = run.config.model_copy(update={"observe": run.config.observe.model_copy(update={"profile_step": 3})})
    with StepRows(run) as rows:
        for step in range(1, 6):
            rows.begin(step)
            rows.end(result(1.0))
    assert [step for step, _, tags in written(run) if "profile" in tags] == [3, 4]


def test_the_first_step_after_a_resume_is_a_restart(run: Run) -> None:
    run.progress.step = 40
    with StepRows(run) as rows:
        rows.begin(41)
        rows.end(result(1.0))
    assert written(run) == [(41, 1.0, {"first step", "restart"})]


def test_collections_of_python_are_activities(run: Run) -> None:
    callbacks = list(gc.callbacks)
    with StepRows(run) as rows:
        rows.begin(3)
        kept = [[] for _ in range(200_000)]  # a collection of them takes longer than the shortest activity
        gc.collect()
        rows.end(result(1.0))
    assert gc.callbacks == callbacks and len(kept) == 200_000
    drained, texts = drain(run.mesh.recorder)
    events = drained.events
    assert "gc" in {texts[event["name"]] for event in events}
    assert set(events["step"].tolist()) == {3}


def test_a_collection_inside_an_action_is_not_its_own_time(run: Run) -> None:
    recorder, kept = run.mesh.recorder, [[] for _ in range(200_000)]
    with StepRows(run) as rows:
        rows.begin(3)
        recorder.step = 3
        with recorder.action("F", 0, 0):
            gc.collect()
        recorder.step = 0
        rows.end(result(1.0))
    assert len(kept) == 200_000
    drained, texts = drain(run.mesh.recorder)
    events = drained.events
    action, pause = (next(event for event in events if texts[event["name"]] == name) for name in ("F", "gc"))
    assert action["exposed"] == pytest.approx(pause["exposed"])


def test_pauses_of_the_process_are_activities_that_others_contain(run: Run) -> None:
    run.mesh.recorder.log.pauses.extend([(1.0, 1.5), (2.0, 2.25)])
    with StepRows(run) as rows:
        rows.begin(3)
        rows.end(result(1.0))
    drained, texts = drain(run.mesh.recorder)
    events = drained.events
    found = [event for event in events if texts[event["name"]] == "pause"]
    assert [float(event["end"] - event["start"]) for event in found] == [0.5, 0.25]
    assert not any(event["exposed"] for event in found)


def test_a_step_that_fails_has_no_row(run: Run) -> None:
    with pytest.raises(ZeroDivisionError), StepRows(run) as rows:
        rows.begin(1)
        rows.end(result(1.0))
        rows.begin(2)
        raise ZeroDivisionError
    assert [step for step, _, _ in written(run)] == [1]
