"""A step fills the host's wait for the device: the next batch is read, and event records are resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import DataError
from megascale.core.rank import Rank
from megascale.data.mix.samples import SampleSource
from tests.runs import GPT, build_run, config_of, settings
from tests.worlds import run_world

SIZES = GPT | {"num_layers": 1, "hidden_size": 16}


def configured(folder: Path, **changes: Any) -> Any:
    return config_of(settings(SIZES, folder, train__precision="fp32", **changes), folder)


class Lagging:
    """A device that is `lag` marks behind the host. `free`: every query advances the device by one mark."""

    synchronous = False

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self.marks = self.passed = 0
        self.free = False

    def mark(self) -> Any:
        self.marks += 1
        self.passed = max(self.passed, self.marks - self._lag)
        return self.marks

    def seconds(self, mark: Any) -> float | None:
        self.passed += self.free
        return float(mark) if mark <= self.passed else None


class Watched(SampleSource):
    """Samples that record their reads. Sample `bad` raises a DataError."""

    def __init__(self, run: Any, bad: int = -1) -> None:
        self._run, self._samples, self._bad = run, run.train_loader.samples, bad
        self.read: list[tuple[int, int]] = []
        run.train_loader.samples = self

    def __getitem__(self, index: int) -> Any:
        self.read.append((index, self._run.progress.step))
        if index == self._bad:
            raise DataError(f"sample {index} is bad")
        return self._samples[index]


def on_a_device(rank: Rank, config: Any, lag: int = 0) -> Any:
    """A run whose recorder takes times from a lagging device."""
    run = build_run(rank, config)
    device = Lagging(lag)
    run.mesh.recorder.timer, run.mesh.recorder.mark = device, device.mark
    return run


def reads(rank: Rank, config: Any, device: bool) -> list[tuple[int, int]]:
    """Samples in the order of their reads, with the number of completed steps."""
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    run = on_a_device(rank, config) if device else build_run(rank, config)
    samples = Watched(run)
    train(run, Reporter(config, run.device, None, [], run.mesh.recorder))
    return samples.read


def test_the_next_batch_is_read_one_step_ahead_and_none_after_the_last(tmp_path: Path) -> None:
    (read,) = run_world(1, reads, configured(tmp_path, batch__global=4, train__steps=3), True)
    assert read == [*((i, 0) for i in range(8)), *((i, 1) for i in range(8, 12))]


def test_a_cpu_reads_a_batch_at_the_start_of_its_step(tmp_path: Path) -> None:
    """The read overlaps the parameter all-gather of the last step."""
    (read,) = run_world(1, reads, configured(tmp_path, batch__global=4, train__steps=3), False)
    assert read == [(i, i // 4) for i in range(12)]


def stopped_by(rank: Rank, config: Any, bad: int) -> tuple[str, int, list[float]]:
    """Train with a bad sample. Returns the error's text, the last step and the losses."""
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    losses: list[float] = []

    class FailureCost:
        name = "losses"

        def write(self, record: Any) -> None:
            losses.append(record.loss)

        def write_message(self, text: str) -> None: ...

        def close(self) -> None: ...

    run = on_a_device(rank, config)
    Watched(run, bad)
    try:
        train(run, Reporter(config, run.device, None, [FailureCost()], run.mesh.recorder))
    except DataError as error:
        return str(error), run.progress.step, losses
    return "", run.progress.step, losses


@pytest.mark.parametrize(("bad", "done"), [(1, 0), (10, 2)])
def test_a_bad_sample_ends_the_step_that_trains_on_it(bad: int, done: int, tmp_path: Path) -> None:
    """The sample is read one step earlier, but that step completes and is recorded."""
    ((error, step, losses),) = run_world(1, stopped_by, configured(tmp_path, batch__global=4, train__steps=4), bad)
    assert error == f"sample {bad} is bad"
    assert step == len(losses) == done


def unresolved(rank: Rank, config: Any, lag: int) -> tuple[int, int]:
    """Numbers of unresolved records in a step: the highest, and while the host waits for the totals."""
    from megascale.train.step import train_step

    run = on_a_device(rank, config, lag)
    recorder, copy_to_host = run.mesh.recorder, run.device.copy_to_host
    device: Any = recorder.timer
    highest, waiting = [0], [0]

    def mark() -> Any:
        highest.append(len(recorder._unresolved))
        return device.mark()

    def lagging_copy(values: Any) -> Any:
        device.free = True

        def wait() -> list[float]:
            waiting.append(len(recorder._unresolved))
            return copy_to_host(values)()

        return wait

    recorder.mark = mark
    object.__setattr__(run.device, "copy_to_host", lagging_copy)
    train_step(run, run.train_loader.batch(0))
    return max(highest), waiting[1]


def test_records_are_resolved_while_a_step_is_issued(tmp_path: Path) -> None:
    """Of 64 forwards and 64 backwards only a few are unresolved at a time."""
    ((highest, _),) = run_world(1, unresolved, configured(tmp_path, batch__global=64), 20)
    assert 10 <= highest <= 16


def test_records_are_resolved_while_the_host_waits(tmp_path: Path) -> None:
    """The device starts only when the host waits."""
    from megascale.record.recorder import MAX_MARKS_AT_ONCE

    ((highest, waiting),) = run_world(1, unresolved, configured(tmp_path, batch__global=64), 10_000)
    assert highest > 128 and waiting <= MAX_MARKS_AT_ONCE
