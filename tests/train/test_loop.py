"""When the loop records, evaluates, saves and stops."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import CheckpointError, Exit
from megascale.core.rank import Rank
from megascale.train.gc import EVERY, ScheduledCollection
from tests.runs import LLAMA, build_run, config_of, settings
from tests.worlds import run_world

SIZES = LLAMA | {"num_layers": 2}


class Diary:
    """A writer that keeps the order of events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def write(self, record: Any) -> None:
        self.events.append(f"{'valid' if hasattr(record, 'valid_loss') else 'step'} {record.step}")

    def note(self, text: str) -> None:
        self.events.append(text.split("/")[0].split(":")[0] + text.partition("checkpoints")[2].partition(":")[0])

    def close(self) -> None: ...


def events(rank: Rank, config: Any, stop_at: int = 0, broken: bool = False) -> tuple[int, list[str], int]:
    """How a run ended, what its diary says, and its last step. Rank 0 is asked to stop in step `stop_at`; if `broken`,
    no checkpoint before the last can be written.
    """
    from megascale.train.loop import train
    from megascale.train.report import Reporter

    run, diary = build_run(rank, config), Diary()
    draw, begin = run.train.batch, run.checkpoints.begin

    def batch(seen: int) -> Any:
        run.stop.asked = rank.rank == 0 and bool(stop_at) and run.progress.step + 1 >= stop_at
        return draw(seen)

    def fail(progress: Any) -> Any:
        if progress.step < config.train.steps:
            raise CheckpointError("the disk is full", mend="another disk")
        return begin(progress)

    run.train.batch = batch
    if broken:
        run.checkpoints.begin = fail
    status = train(run, Reporter(config, run.device, None, [diary], run.mesh.recorder))
    assert gc.isenabled()
    return status, diary.events, run.progress.step


def configured(folder: Path, **more: Any) -> Any:
    return config_of(settings(SIZES, folder, train__steps=7, train__precision="fp32", **more), folder)


def test_the_order_of_events(tmp_path: Path) -> None:
    """Records at multiples of log_every, the first and the last step; evaluations also before the first and after the
    last; checkpoints after evaluations, and one at the end.
    """
    more = {"train__log_every": 3, "train__eval_every": 2, "train__eval_steps": 1, "checkpoint__every": 3}
    more["checkpoint__async"] = False
    ((status, found, step),) = run_world(1, events, configured(tmp_path, **more))
    assert (status, step) == (Exit.OK, 7)
    assert found == [
        "valid 0", "step 1", "valid 2", "step 3", "saved /step-00000003", "valid 4", "step 6", "valid 6",
        "saved /step-00000006", "step 7", "valid 7", "saved /step-00000007",
    ]  # fmt: skip


def test_in_the_background_every_checkpoint_is_completed_and_told(tmp_path: Path) -> None:
    config = configured(tmp_path, checkpoint__every=2, train__log_every=100, parallel__tp=2)
    (status, found, step), _ = run_world(2, events, config)
    assert (status, step) == (Exit.OK, 7)
    assert [event for event in found if event.startswith("saved")] == [f"saved /step-{n:08d}" for n in (2, 4, 6, 7)]
    assert found[-1] == "saved /step-00000007"
    assert len(list(tmp_path.rglob("manifest.json"))) == 4


def test_nothing_is_evaluated_or_saved_that_was_not_asked_for(tmp_path: Path) -> None:
    ((status, found, _),) = run_world(1, events, configured(tmp_path, train__log_every=100))
    assert (status, found) == (Exit.OK, ["step 1", "step 7"])
    assert not list(tmp_path.rglob("checkpoints"))


def test_one_rank_that_is_asked_stops_all_after_the_same_step(tmp_path: Path) -> None:
    config = configured(tmp_path, checkpoint__every=100, parallel__dp=2, train__log_every=100)
    ranks = run_world(2, events, config, 4)
    assert [(status, step) for status, _, step in ranks] == [(Exit.STOPPED, 4)] * 2
    assert ranks[0][1] == ["step 1", "saved /step-00000004", "stopped by a signal after step 4"]


def test_asked_to_stop_in_the_last_step_a_run_is_done(tmp_path: Path) -> None:
    ((status, _, step),) = run_world(1, events, configured(tmp_path), 7)
    assert (status, step) == (Exit.OK, 7)


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    config = configured(tmp_path, checkpoint__every=3, train__log_every=100)
    ((status, found, step),) = run_world(1, events, config, 0, True)
    assert (status, step) == (Exit.OK, 7)
    warnings = [event for event in found if event.startswith("WARNING")]
    assert len(warnings) == 2 and found[-1] == "saved /step-00000007"


def test_garbage_is_collected_at_chosen_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    with ScheduledCollection() as collection:
        assert not gc.isenabled() and len(collected) == 1
        for step in range(1, 2 * EVERY + 1):
            collection.after(step)
        assert len(collected) == 3
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_collection_is_automatic_again_after_an_error() -> None:
    with pytest.raises(KeyError), ScheduledCollection():
        raise KeyError
    assert gc.isenabled()
