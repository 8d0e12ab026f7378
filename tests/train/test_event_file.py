"""Every rank writes an event file, also on errors, and the events agree with the job's metrics."""

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
from megascale.core.events import COMPUTE, RankEvents, event_file_name, read_events
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
class FinishedJob:
    """A finished job of two ranks: its files, the logged steps, and start and end on the host's clock."""

    config: Path
    folder: Path
    steps: list[dict[str, Any]]
    span: tuple[float, float]

    def ranks(self) -> list[RankEvents]:
        return read(self.folder)


def read(folder: Path) -> list[RankEvents]:
    return [read_events(path) for path in sorted((folder / "events").glob(event_file_name("*")))]


@pytest.fixture(scope="module")
def job_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedJob:
    config = job_config(tmp_path_factory.mktemp("job"), SIZES, **RUN)
    start = time.perf_counter()
    steps = finish(config)
    return FinishedJob(config, config.parent / "runs" / "test", steps, (start, time.perf_counter()))


def test_every_rank_writes_a_file(job_run: FinishedJob) -> None:
    assert sorted(path.name for path in (job_run.folder / "events").iterdir()) == [
        event_file_name(0),
        event_file_name(1),
    ]
    for number, rank in enumerate(job_run.ranks()):
        assert (rank.rank, rank.world, rank.dropped) == (number, 2, 0)
        assert rank.coord == {"tp": number, "cp": 0, "dp": 0, "pp": 0}
        assert rank.host
        assert len(rank.clock) == 2, "measured at the start and at the end"
        assert [offset for _, offset in rank.clock] == [0.0, 0.0], "on one host"
        (first, _), (last, _) = rank.clock
        assert job_run.span[0] < first < last < job_run.span[1]
        trained = [event for event in rank.events if event.step]
        assert first < trained[0].start and trained[-1].end < last


def test_every_step_has_its_actions(job_run: FinishedJob) -> None:
    for rank in job_run.ranks():
        assert {event.step for event in rank.events} == set(range(STEPS + 1)), (
            "step 0 holds events before the first step"
        )
        updates = []
        for step in range(1, STEPS + 1):
            actions = [event for event in rank.events if event.step == step and event.axis == COMPUTE]
            counts = Counter((event.name, event.chunk, event.microbatch) for event in actions)
            passes = {(name, 0, microbatch) for name in "FB" for microbatch in range(MICRO_BATCHES)}
            assert {action for action in counts if action[2] >= 0} == passes
            assert all(counts[action] == 1 for action in passes) and counts["grad_norm", -1, -1] == 1
            updates.append(counts.pop(("update", 0, -1)))
            assert counts.keys() == passes | {("grad_norm", -1, -1)}
            assert [event.start for event in actions] == sorted(event.start for event in actions)
        assert updates[0] > 0 and len(set(updates)) == 1


def test_the_metrics_agree_with_the_events_of_rank_0(job_run: FinishedJob) -> None:
    events = job_run.ranks()[0].events
    assert [record["step"] for record in job_run.steps] == list(range(1, STEPS + 1))
    for record in job_run.steps:
        comm = [event for event in events if event.step == record["step"] and event.axis != COMPUTE]
        calls, sizes = Counter(event.axis for event in comm), Counter[str]()
        for event in comm:
            sizes[event.axis] += event.bytes
        assert {axis: (traffic["calls"], traffic["bytes"]) for axis, traffic in record["communication"].items()} == {
            axis: (calls[axis], sizes[axis]) for axis in ("tp", "world")
        }
        # without data parallelism no wait for communication crosses a step
        for axis, traffic in record["communication"].items():
            assert traffic["exposed_s"] == pytest.approx(sum(event.exposed for event in comm if event.axis == axis))
            assert 0 < traffic["exposed_s"] < record["step_time_s"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "events").iterdir()}


def copy_of(job_run: FinishedJob, folder: Path) -> tuple[Path, Path]:
    """Copy a run. Returns the configuration and the run's folder."""
    shutil.copytree(job_run.config.parent, folder / "copy")
    config = job_config(folder / "copy", SIZES, **RUN)
    return config, config.parent / "runs" / "test"


@pytest.mark.slow
def test_a_run_with_fewer_ranks_removes_old_files(job_run: FinishedJob, tmp_path: Path) -> None:
    config, folder = copy_of(job_run, tmp_path)
    assert len(finish(config, "parallel.tp=1", f"train.steps={STEPS + 2}")) == STEPS + 2
    (rank,) = read(folder)
    assert (rank.rank, rank.world) == (0, 1)
    assert {event.step for event in rank.events} == {STEPS + 1, STEPS + 2}


@pytest.mark.slow
def test_without_observe_events_there_are_no_files(job_run: FinishedJob, tmp_path: Path) -> None:
    config, folder = copy_of(job_run, tmp_path)
    finish(config, "observe.events=false", "parallel.tp=1", f"train.steps={STEPS + 1}")
    assert files(folder) == {}, "files of the earlier part are removed too"


@pytest.mark.slow
def test_without_observe_record_there_are_no_events_and_no_traffic(job_run: FinishedJob, tmp_path: Path) -> None:
    config, folder = copy_of(job_run, tmp_path)
    recorded = finish(config, f"train.steps={STEPS + 1}", "checkpoint.every=0")
    unrecorded = finish(config, f"train.steps={STEPS + 1}", "checkpoint.every=0", "observe.record=false")
    assert files(folder) == {}
    assert "communication" in recorded[-1] and "communication" not in unrecorded[-1]
    assert recorded[-1]["loss"] == unrecorded[-1]["loss"]


@pytest.mark.parametrize(
    ("override", "status"), [("train.log_every=1", Exit.OK), ("model.ffn_size=64", Exit.CHECKPOINT)]
)
@pytest.mark.slow
def test_a_run_without_steps_keeps_the_files(override: str, status: Exit, job_run: FinishedJob, tmp_path: Path) -> None:
    """Two cases: the run is complete, and the checkpoint belongs to another model."""
    config, folder = copy_of(job_run, tmp_path)
    exit_status, _, err = Job(config, "parallel.tp=1", override).end()
    assert exit_status == status, err
    assert files(folder) == files(job_run.folder) != {}


@pytest.mark.slow
def test_a_stopped_job_writes_the_files(tmp_path: Path) -> None:
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
def test_a_failed_job_writes_the_files(tmp_path: Path) -> None:
    """The weights diverge: the run ends with an error, and the files hold all events until then."""
    job = Job(job_config(tmp_path, SIZES, **RUN | {"optimizer__lr": 1e30, "train__steps": 100, "checkpoint__every": 0}))
    status, _, err = job.end()
    assert status == Exit.DO_NOT_REQUEUE, err
    ranks = read(job.folder)
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert len(rank.clock) == 1, "no measurement at the end"
        assert {event.step for event in rank.events} == set(range(len(job.steps()) + 2))


def event_file(folder: Path) -> Any:
    """The `EventFile` of a single process."""
    from megascale.comm.mesh import single_process_mesh
    from megascale.train.event_file import EventFile

    config: Any = SimpleNamespace(folder=folder, observe=SimpleNamespace(events=True, record=True))
    run: Any = SimpleNamespace(mesh=single_process_mesh(), config=config)
    return EventFile(run, Rank(0, 1, 0, "here"))


@pytest.fixture
def process_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `event_file` without a store, which a single process does not need."""
    from megascale.train import event_file

    monkeypatch.setattr(event_file, "_get_default_store", lambda: None)
    return event_file


def test_a_full_disk_does_not_change_how_a_run_ends(
    process_alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, events: RankEvents) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(process_alone, "write_events", full)
    with event_file(tmp_path):
        pass
    assert capsys.readouterr().err == f"WARNING: {tmp_path / 'events'} cannot be written: No space left on device\n"


def test_a_lost_run_folder_is_not_made_anew(
    process_alone: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under an unmounted file system: what the next start found there would be another run."""
    with event_file(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
    said = f"WARNING: {tmp_path}/run/events cannot be written: No such file or directory\n"
    assert capsys.readouterr().err == said


def test_a_rank_whose_peers_fail_at_the_end_writes_its_file(
    process_alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offset(world: Any, store: Any, label: str, host: str) -> tuple[float, float]:
        if label == "end":
            raise RuntimeError("Connection closed by peer")
        return 1.0, 0.0

    monkeypatch.setattr(process_alone.clock, "clock_offset", offset)
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


def test_after_an_error_the_clocks_are_not_compared(
    process_alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError), event_file(tmp_path):
        monkeypatch.setattr(process_alone.clock, "clock_offset", None)
        raise KeyError
    assert len(read(tmp_path)[0].clock) == 1
