"""The training loop: times of records, evaluations, saves and stops."""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megascale.core.errors import CheckpointError, Exit
from megascale.core.rank import Rank
from megascale.record.log import LogIdentity, RankLog, open_log
from megascale.record.log_reader import read_state
from megascale.train.run import Hook
from megascale.train.saves import Saves
from megascale.train.scheduled_gc import COLLECT_EVERY, ScheduledGC
from tests.runs import LLAMA, build_run, config_of, settings, train_curve
from tests.worlds import run_world

SIZES = LLAMA | {"num_layers": 2}


class Diary:
    """A writer that keeps the order of records and messages."""

    name = "a diary"

    def __init__(self) -> None:
        self.events: list[str] = []

    def write(self, record: Any) -> None:
        self.events.append(f"{'valid' if hasattr(record, 'valid_loss') else 'step'} {record.step}")

    def write_message(self, text: str) -> None:
        self.events.append(text.split("/")[0].split(":")[0] + text.partition("checkpoints")[2].partition(":")[0])

    def close(self) -> None: ...


def events(rank: Rank, config: Any, stop_at: int = 0, broken: bool = False) -> tuple[int, list[str], int]:
    """Train. Returns the exit status, the diary's events and the last step.

    `stop_at`: step in which rank 0 gets a stop request; `broken`: saves fail, except the last.
    """
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    run, diary = build_run(rank, config), Diary()
    load_batch, start_save = run.train_loader.batch, run.checkpoints.start_save

    def batch(consumed_samples: int) -> Any:
        run.stop.requested = rank.rank == 0 and bool(stop_at) and run.progress.step + 1 >= stop_at
        return load_batch(consumed_samples)

    def fail(progress: Any) -> Any:
        if progress.step < config.train.steps:
            raise CheckpointError("the disk is full", hint="another disk")
        return start_save(progress)

    run.train_loader.batch = batch
    if broken:
        run.checkpoints.start_save = fail
    status = train(run, Reporter(config, run.device, None, [diary], run.mesh.recorder))
    assert gc.isenabled()
    return status, diary.events, run.progress.step


def configured(folder: Path, **changes: Any) -> Any:
    return config_of(settings(SIZES, folder, train__steps=7, train__precision="fp32", **changes), folder)


def test_the_order_of_events(tmp_path: Path) -> None:
    """Records at multiples of log_every, first and last step; evaluations also before the first and after the last;
    checkpoints after evaluations, and at the end.
    """
    changes = {"train__log_every": 3, "train__eval_every": 2, "train__eval_steps": 1, "checkpoint__every": 3}
    changes["checkpoint__async"] = False
    ((status, log, step),) = run_world(1, events, configured(tmp_path, **changes))
    assert (status, step) == (Exit.OK, 7)
    assert log == [
        "valid 0", "start", "step 1", "valid 2", "step 3", "saved /step-00000003", "valid 4", "step 6", "valid 6",
        "saved /step-00000006", "step 7", "valid 7", "saved /step-00000007",
    ]  # fmt: skip


def test_every_background_save_is_completed_and_reported(tmp_path: Path) -> None:
    config = configured(tmp_path, checkpoint__every=2, train__log_every=100, parallel__tp=2)
    (status, log, step), _ = run_world(2, events, config)
    assert (status, step) == (Exit.OK, 7)
    assert [event for event in log if event.startswith("saved")] == [f"saved /step-{n:08d}" for n in (2, 4, 6, 7)]
    assert log[-1] == "saved /step-00000007"
    assert len(list(tmp_path.rglob("manifest.json"))) == 4


def test_by_default_nothing_is_evaluated_or_saved(tmp_path: Path) -> None:
    ((status, log, _),) = run_world(1, events, configured(tmp_path, train__log_every=100))
    assert (status, log) == (Exit.OK, ["start", "step 1", "step 7"])
    assert not list(tmp_path.rglob("checkpoints"))


def test_a_stop_request_on_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    config = configured(tmp_path, checkpoint__every=100, parallel__dp=2, train__log_every=100)
    ranks = run_world(2, events, config, 4)
    assert [(status, step) for status, _, step in ranks] == [(Exit.STOPPED, 4)] * 2
    assert ranks[0][1] == [
        "start",
        "step 1",
        "saved /step-00000004",
        "stopped by a signal after step 4, which is saved",
    ]


def test_a_stop_request_in_the_last_step_is_a_success(tmp_path: Path) -> None:
    ((status, _, step),) = run_world(1, events, configured(tmp_path), 7)
    assert (status, step) == (Exit.OK, 7)


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    config = configured(tmp_path, checkpoint__every=3, train__log_every=100)
    ((status, log, step),) = run_world(1, events, config, 0, True)
    assert (status, step) == (Exit.OK, 7)
    warnings = [event for event in log if event.startswith("WARNING")]
    assert len(warnings) == 2 and log[-1] == "saved /step-00000007"


class Steps:
    """A run as far as the collection looks at it."""

    def __init__(self) -> None:
        self.progress, self.mesh = self, self
        self.recorder = self
        self.log, self.step = RankLog(), 0


@pytest.mark.parametrize("every", [0, 5])
def test_only_a_run_that_saves_counts_failed_checkpoints(tmp_path: Path, every: int) -> None:
    """The alert about old checkpoints asks for the counter."""
    config = config_of(settings(SIZES, tmp_path, checkpoint__every=every), tmp_path)
    log = open_log(LogIdentity("r", 0, 1), path := tmp_path / "rank.flight")
    run = SimpleNamespace(config=config, mesh=SimpleNamespace(recorder=SimpleNamespace(log=log)))
    Saves(cast(Any, None)).run_begins(cast(Any, run))
    assert ("checkpoint_failures" in read_state(path).totals) == bool(every)


def test_garbage_is_collected_only_at_fixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    collection, run = ScheduledGC(), cast(Any, Steps())
    collection.run_begins(run)
    assert not gc.isenabled() and len(collected) == 1
    for run.step in range(1, 2 * COLLECT_EVERY + 1):
        collection.step_ends(run, cast(Any, None))
    assert len(collected) == 3
    collection.run_ends(run)
    assert gc.isenabled() and gc.get_freeze_count() == 0


class Fails(Hook):
    """Fails at a moment; notes the moments of the run."""

    def __init__(self, moment: str) -> None:
        self.moments: list[str] = []
        for name in (
            "run_begins",
            "step_begins",
            "step_ends",
            "evaluation_ends",
            "save_starts",
            "save_ends",
            "run_ends",
        ):
            setattr(self, name, partial(self._reach, name, fails=name == moment))

    def _reach(self, name: str, run: Any, *_: Any, fails: bool) -> None:
        self.moments.append(f"{name} {run.progress.step}")
        if fails:
            raise KeyError(name)

    def run_fails(self, run: Any, error: BaseException) -> None:
        self.moments.append(f"{type(error).__name__} {run.progress.step}")


def moments(rank: Rank, config: Any, failing: str) -> tuple[list[str], bool]:
    """Train with a hook of a plug-in. Returns its moments, and True if automatic collection is on again."""
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    run, hook = build_run(rank, config), Fails(failing)
    run.hooks.add(hook)
    with suppress(KeyError):
        train(run, Reporter(config, run.device, None, [], run.mesh.recorder))
    return hook.moments, gc.isenabled()


def test_hooks_act_at_their_moments(tmp_path: Path) -> None:
    changes = {"train__steps": 3, "train__eval_every": 2, "train__eval_steps": 1, "checkpoint__every": 2}
    config = config_of(settings(SIZES, tmp_path, train__precision="fp32", checkpoint__async=False, **changes), tmp_path)
    begin = ["evaluation_ends 0", "run_begins 0", "step_begins 0", "step_ends 1"]
    expected = [
        *begin, "step_begins 1", "evaluation_ends 2", "save_starts 2", "save_ends 2", "step_ends 2", "step_begins 2",
        "evaluation_ends 3", "step_ends 3", "save_starts 3", "save_ends 3", "run_ends 3",
    ]  # fmt: skip
    assert run_world(1, moments, config, "") == [(expected, True)]
    failing = config_of(settings(SIZES, tmp_path / "failing", train__precision="fp32", **changes), tmp_path)
    assert run_world(1, moments, failing, "step_ends") == [([*begin, "KeyError 1"], True)]


class Counts(Hook):
    """A plug-in with a total of its own."""

    def __init__(self, part: float, name: str = "sevens") -> None:
        self._part, self._name = part, name
        self.sums: list[float] = []

    def add_totals(self, run: Any, totals: Any) -> None:
        totals.add(**{self._name: self._part})

    def step_ends(self, run: Any, result: Any) -> None:
        self.sums.append(result.totals[self._name])


def counted(rank: Rank, config: Any) -> tuple[list[float], list[float], str]:
    from megascale.train.step import train_step

    run, hook = build_run(rank, config), Counts(7.0 + rank.rank)
    run.hooks.add(hook)
    losses = []
    for _ in range(2):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        run.hooks.step_ends(run, result)
        losses.append(result.loss)
    run.hooks.add(Counts(1.0, "loss"))
    with pytest.raises(ValueError, match="there is a total named 'loss' already") as error:
        train_step(run, run.train_loader.batch(run.progress.samples))
    return hook.sums, losses, str(error.value)


def test_a_plug_in_adds_a_total(tmp_path: Path) -> None:
    config = configured(tmp_path, parallel__pp=2)
    (first, losses, _), second = run_world(2, counted, config)
    assert first == second[0] == [15.0, 15.0], "every rank gets the sum over the ranks"
    assert losses == second[1] == [loss for loss, _ in run_world(2, train_curve, config, 2)[0]]
