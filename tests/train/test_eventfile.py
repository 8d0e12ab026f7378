"""Each rank of a job leaves its ledger, however the job ends, and it agrees with the job's metrics."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascale.core.errors import Exit
from megascale.core.events import COMPUTE, RankEvents, file_name, read_events
from megascale.core.rank import Rank
from tests.jobs import Job, finish, job_config
from tests.runs import GPT

SIZES = GPT | {"num_layers": 2}
STEPS = 4
RUN: dict[str, Any] = {
    "parallel__tp": 2,
    "train__steps": STEPS,
    "train__precision": "fp32",
    "checkpoint__every": 100,  # at the end
    "optimizer__decay": "constant",
}
MICRO_BATCHES = 8


@dataclass(frozen=True)
class Left:
    """What a job of two ranks left: its files, the logged steps, and when it began and ended by the machine's clock."""

    config: Path
    folder: Path
    steps: list[dict[str, Any]]
    span: tuple[float, float]

    def ranks(self) -> list[RankEvents]:
        return read(self.folder)


def read(folder: Path) -> list[RankEvents]:
    return [read_events(path) for path in sorted((folder / "events").glob(file_name("*")))]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    config = job_config(tmp_path_factory.mktemp("left"), SIZES, **RUN)
    start = time.perf_counter()
    steps = finish(config)
    return Left(config, config.parent / "runs" / "test", steps, (start, time.perf_counter()))


def test_every_rank_leaves_a_file(left: Left) -> None:
    assert sorted(path.name for path in (left.folder / "events").iterdir()) == [file_name(0), file_name(1)]
    for number, rank in enumerate(left.ranks()):
        assert (rank.rank, rank.world, rank.dropped) == (number, 2, 0)
        assert rank.coord == {"tp": number, "cp": 0, "dp": 0, "pp": 0}
        assert rank.host
        assert len(rank.clock) == 2, "measured at the start and at the end"
        assert [offset for _, offset in rank.clock] == [0.0, 0.0], "on one host"
        (first, _), (last, _) = rank.clock
        assert left.span[0] < first < last < left.span[1]
        trained = [event for event in rank.events if event.step]
        assert first < trained[0].start and trained[-1].end < last


def test_every_step_has_its_actions(left: Left) -> None:
    for rank in left.ranks():
        assert {event.step for event in rank.events} == set(range(STEPS + 1)), "0 is what came before"
        updates = []
        for step in range(1, STEPS + 1):
            actions = [event for event in rank.events if event.step == step and event.axis == COMPUTE]
            found = Counter((event.name, event.chunk, event.microbatch) for event in actions)
            both = {(name, 0, microbatch) for name in "FB" for microbatch in range(MICRO_BATCHES)}
            assert {action for action in found if action[2] >= 0} == both
            assert all(found[action] == 1 for action in both) and found["norms", -1, -1] == 1
            updates.append(found.pop(("update", 0, -1)))
            assert found.keys() == both | {("norms", -1, -1)}
            assert [event.start for event in actions] == sorted(event.start for event in actions)
        assert updates[0] > 0 and len(set(updates)) == 1


def test_the_metrics_are_what_the_events_of_rank_0_say(left: Left) -> None:
    events = left.ranks()[0].events
    assert [record["step"] for record in left.steps] == list(range(1, STEPS + 1))
    for record in left.steps:
        own = [event for event in events if event.step == record["step"] and event.axis != COMPUTE]
        calls, sizes = Counter(event.axis for event in own), Counter[str]()
        for event in own:
            sizes[event.axis] += event.bytes
        assert {axis: (said["calls"], said["bytes"]) for axis, said in record["communication"].items()} == {
            axis: (calls[axis], sizes[axis]) for axis in ("tp", "world")
        }
        for axis, said in record[
            "communication"
        ].items():  # one host, no data parallelism: a step waits for all its own
            assert said["exposed_s"] == pytest.approx(sum(event.exposed for event in own if event.axis == axis))
            assert 0 < said["exposed_s"] < record["step_time_s"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "events").iterdir()}


def copy_of(left: Left, folder: Path) -> tuple[Path, Path]:
    """The same run in another place: its configuration, and its folder."""
    shutil.copytree(left.config.parent, folder / "copy")
    config = job_config(folder / "copy", SIZES, **RUN)
    return config, config.parent / "runs" / "test"


@pytest.mark.slow
def test_a_run_with_fewer_ranks_leaves_no_file_of_those_that_are_gone(left: Left, tmp_path: Path) -> None:
    config, folder = copy_of(left, tmp_path)
    assert len(finish(config, "parallel.tp=1", f"train.steps={STEPS + 2}")) == STEPS + 2
    (rank,) = read(folder)
    assert (rank.rank, rank.world) == (0, 1)
    assert {event.step for event in rank.events} == {STEPS + 1, STEPS + 2}


@pytest.mark.slow
def test_without_events_there_are_none(left: Left, tmp_path: Path) -> None:
    config, folder = copy_of(left, tmp_path)
    finish(config, "observe.events=false", "parallel.tp=1", f"train.steps={STEPS + 1}")
    assert files(folder) == {}, "nor are those of an earlier part left"


@pytest.mark.slow
def test_without_a_ledger_there_is_nothing_to_tell(left: Left, tmp_path: Path) -> None:
    config, folder = copy_of(left, tmp_path)
    with_it = finish(config, f"train.steps={STEPS + 1}", "checkpoint.every=0")
    without = finish(config, f"train.steps={STEPS + 1}", "checkpoint.every=0", "observe.ledger=false")
    assert files(folder) == {}
    assert "communication" in with_it[-1] and "communication" not in without[-1]
    assert with_it[-1]["loss"] == without[-1]["loss"]


@pytest.mark.parametrize(("more", "status"), [("train.log_every=1", Exit.OK), ("model.ffn_size=64", Exit.CHECKPOINT)])
@pytest.mark.slow
def test_a_run_that_trains_nothing_leaves_those_that_there_are(
    more: str, status: Exit, left: Left, tmp_path: Path
) -> None:
    """One that is done already, and one that is refused because its checkpoint is of another model."""
    config, folder = copy_of(left, tmp_path)
    found, _, err = Job(config, "parallel.tp=1", more).end()
    assert found == status, err
    assert files(folder) == files(left.folder) != {}


@pytest.mark.slow
def test_a_job_that_is_stopped_leaves_them_too(tmp_path: Path) -> None:
    job = Job(job_config(tmp_path, SIZES, **RUN | {"train__steps": 100_000}))
    job.wait_for_step(2)
    job.signal(signal.SIGTERM)
    status, _, err = job.end()
    assert status == Exit.STOPPED, err
    last = job.steps()[-1]["step"]
    ranks = read(job.folder)
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert len(rank.clock) == 2
        assert max(event.step for event in rank.events) == last


@pytest.mark.slow
def test_a_job_that_fails_leaves_what_it_did(tmp_path: Path) -> None:
    """Weights that grow without bound: the run ends with an error, and its ranks say what they did until then."""
    job = Job(job_config(tmp_path, SIZES, **RUN | {"optimizer__lr": 1e30, "train__steps": 100, "checkpoint__every": 0}))
    status, _, err = job.end()
    assert status == Exit.DO_NOT_REQUEUE, err
    ranks = read(job.folder)
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert len(rank.clock) == 1, "there is no end to meet at"
        assert {event.step for event in rank.events} == set(range(len(job.steps()) + 2))


def event_file(folder: Path) -> Any:
    """That of a process alone."""
    from megascale.comm.mesh import single
    from megascale.train.eventfile import EventFile

    config: Any = SimpleNamespace(folder=folder, observe=SimpleNamespace(events=True, ledger=True))
    run: Any = SimpleNamespace(mesh=single(), config=config)
    return EventFile(run, Rank(0, 1, 0, "here"))


@pytest.fixture
def process_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, without a store: one process alone does not ask it."""
    from megascale.train import eventfile

    monkeypatch.setattr(eventfile, "_get_default_store", lambda: None)
    return eventfile


def test_a_full_disk_does_not_change_how_a_run_ends(
    process_alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, events: RankEvents) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(process_alone, "write_events", full)
    with event_file(tmp_path):
        pass
    assert capsys.readouterr().err == f"WARNING: {tmp_path / 'events'} cannot be written: No space left on device\n"


def test_a_rank_whose_others_fail_at_the_end_leaves_its_file(
    process_alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offset(world: Any, store: Any, label: str, host: str) -> tuple[float, float]:
        if label == "end":
            raise RuntimeError("Connection closed by peer")
        return 1.0, 0.0

    monkeypatch.setattr(process_alone.clock, "offset", offset)
    with pytest.raises(RuntimeError, match="closed by peer"), event_file(tmp_path):
        pass
    (rank,) = read(tmp_path)
    assert rank.clock == ((1.0, 0.0),)


def test_a_device_that_has_failed_does_not_hide_the_error(
    process_alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = event_file(tmp_path)

    def failed() -> list[Any]:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(KeyError), file:
        monkeypatch.setattr(file._run.mesh.recorder, "events", failed)
        raise KeyError
    assert capsys.readouterr().err == (
        f"WARNING: {tmp_path / 'events'} cannot be written: an illegal memory access was encountered\n"
    )


def test_an_error_is_not_followed_by_a_meeting(
    process_alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError), event_file(tmp_path):
        monkeypatch.setattr(process_alone.clock, "offset", None)
        raise KeyError
    assert len(read(tmp_path)[0].clock) == 1
