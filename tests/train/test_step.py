"""What a step does while its host would wait for the device: it reads the next batch, and settles records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import DataError
from megascale.core.rank import Rank
from tests.runs import GPT, build_run, config_of, settings
from tests.worlds import run_world

SIZES = GPT | {"num_layers": 1, "hidden_size": 16}


def configured(folder: Path, **more: Any) -> Any:
    return config_of(settings(SIZES, folder, train__precision="fp32", **more), folder)


class Lagging:
    """A device that is `lag` marks behind the host; when it is `free` it comes to one more each time it is asked."""

    host = False

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


class Watched:
    """Samples that tell when each is read, of which one is `bad`."""

    def __init__(self, run: Any, bad: int = -1) -> None:
        self._run, self._samples, self._bad = run, run.train._samples, bad
        self.read: list[tuple[int, int]] = []
        run.train._samples = self

    def __getitem__(self, index: int) -> Any:
        self.read.append((index, self._run.progress.step))
        if index == self._bad:
            raise DataError(f"sample {index} is bad")
        return self._samples[index]

    def prepare(self, start: int, stop: int) -> None:
        self._samples.prepare(start, stop)


def on_a_device(rank: Rank, config: Any, lag: int = 0) -> Any:
    """A run whose ledger tells the time of a device."""
    run = build_run(rank, config)
    device = Lagging(lag)
    run.mesh.recorder.timer, run.mesh.recorder.mark = device, device.mark
    return run


def reads(rank: Rank, config: Any, device: bool) -> list[tuple[int, int]]:
    """Samples in the order in which a run reads them, each with the steps that were done."""
    from megascale.train.loop import train
    from megascale.train.report import Reporter

    run = on_a_device(rank, config) if device else build_run(rank, config)
    samples = Watched(run)
    train(run, Reporter(config, run.device, None, [], run.mesh.recorder))
    return samples.read


def test_the_next_batch_is_read_in_the_step_before_it_and_none_after_the_last(tmp_path: Path) -> None:
    (found,) = run_world(1, reads, configured(tmp_path, batch__global=4, train__steps=3), True)
    assert found == [*((i, 0) for i in range(8)), *((i, 1) for i in range(8, 12))]


def test_a_host_that_computes_reads_a_batch_when_it_needs_it(tmp_path: Path) -> None:
    """While the weights that the last step has updated are gathered."""
    (found,) = run_world(1, reads, configured(tmp_path, batch__global=4, train__steps=3), False)
    assert found == [(i, i // 4) for i in range(12)]


def stopped_by(rank: Rank, config: Any, bad: int) -> tuple[str, int, list[float]]:
    """What ended a run with a bad sample, after which step, and the losses until then."""
    from megascale.train.loop import train
    from megascale.train.report import Reporter

    losses: list[float] = []

    class Losses:
        def write(self, record: Any) -> None:
            losses.append(record.loss)

        def note(self, text: str) -> None: ...

        def close(self) -> None: ...

    run = on_a_device(rank, config)
    Watched(run, bad)
    try:
        train(run, Reporter(config, run.device, None, [Losses()], run.mesh.recorder))
    except DataError as error:
        return str(error), run.progress.step, losses
    return "", run.progress.step, losses


@pytest.mark.parametrize(("bad", "done"), [(1, 0), (10, 2)])
def test_a_bad_sample_ends_the_step_that_trains_on_it(bad: int, done: int, tmp_path: Path) -> None:
    """Though it is read in the one before it, which is done and recorded."""
    ((error, step, losses),) = run_world(1, stopped_by, configured(tmp_path, batch__global=4, train__steps=4), bad)
    assert error == f"sample {bad} is bad"
    assert step == len(losses) == done


def unsettled(rank: Rank, config: Any, lag: int) -> tuple[int, int]:
    """How many records wait to be settled in a step: at most, and when the host waits for the numbers."""
    from megascale.train.step import train_step

    run = on_a_device(rank, config, lag)
    recorder, read = run.mesh.recorder, run.device.read
    device: Any = recorder.timer
    most, waiting = [0], [0]

    def mark() -> Any:
        most.append(len(recorder._marked))
        return device.mark()

    def numbers(values: Any) -> Any:
        device.free = True

        def wait() -> list[float]:
            waiting.append(len(recorder._marked))
            return read(values)()

        return wait

    recorder.mark = mark
    object.__setattr__(run.device, "read", numbers)
    train_step(run, run.train.batch(0))
    return max(most), waiting[1]


def test_records_settle_while_a_step_is_issued(tmp_path: Path) -> None:
    """Some of 64 forwards and as many backwards are under way, not all."""
    ((most, _),) = run_world(1, unsettled, configured(tmp_path, batch__global=64), 20)
    assert 10 <= most <= 16


def test_records_settle_while_the_host_waits(tmp_path: Path) -> None:
    """A device that does nothing before the host waits for it."""
    from megascale.trace.recorder import MOST

    ((most, waiting),) = run_world(1, unsettled, configured(tmp_path, batch__global=64), 10_000)
    assert most > 128 and waiting <= MOST
