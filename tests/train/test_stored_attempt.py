"""The events of every rank are in the event store, also after errors, and agree with the job's metrics."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import Exit
from megascale.operate.store.query import open_store
from megascale.operate.store.rank_events import read_rank_events
from megascale.record.events import COMPUTE, RankEvents
from tests.jobs import Job, finish, job_config
from tests.runs import GPT

SIZES = GPT | {"num_layers": 2}
STEPS = 7
RUN: dict[str, Any] = {
    "parallel__tp": 2,
    "train__steps": STEPS,
    "train__precision": "fp32",
    "checkpoint__every": 100,  # at the end
    "optimizer__decay": "constant",
    "observe__event_store": True,
}
EVALUATIONS = {"train__eval_every": 3, "observe__store_interval_s": 1.0}
EVALUATED = (3, 6, 7)
"""Steps of which the store also has what ranks did in the evaluation after them."""

MICRO_BATCHES = 8


@dataclass(frozen=True)
class FinishedJob:
    """A finished job of two ranks: its files, and the logged steps."""

    config: Path
    folder: Path
    steps: list[dict[str, Any]]

    def ranks(self) -> list[RankEvents]:
        return read(self.folder)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        return open_store(self.folder).execute(sql).fetchall()


def read(folder: Path) -> list[RankEvents]:
    return [stored.events for stored in read_rank_events(folder, lambda rank: True, range(1000))]


@pytest.fixture(scope="module")
def job_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedJob:
    config = job_config(tmp_path_factory.mktemp("job"), SIZES, **RUN, **EVALUATIONS)
    return FinishedJob(config, config.parent / "runs" / "test", finish(config))


def test_every_rank_has_its_events_and_its_place(job_run: FinishedJob) -> None:
    for number, rank in enumerate(job_run.ranks()):
        assert (rank.rank, rank.world, rank.dropped) == (number, 2, 0)
        assert rank.coord == {"tp": number, "cp": 0, "dp": 0, "pp": 0}
        assert rank.host


def test_every_step_has_its_actions(job_run: FinishedJob) -> None:
    for rank in job_run.ranks():
        assert {event.step for event in rank.events} == set(range(STEPS + 1)), (
            "step 0 holds events before the first step"
        )
        updates = []
        for step in set(range(1, STEPS + 1)) - set(EVALUATED):
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
    for record in [record for record in job_run.steps if record["step"] not in EVALUATED]:
        comm = [event for event in events if event.step == record["step"] and event.axis != COMPUTE]
        calls, sizes = Counter(event.axis for event in comm), Counter[str]()
        for event in comm:
            sizes[event.axis] += event.bytes
        assert {axis: (traffic["calls"], traffic["bytes"]) for axis, traffic in record["communication"].items()} == {
            axis: (calls[axis], sizes[axis]) for axis in ("tp", "world")
        }
        # without data parallelism no wait for communication crosses a step
        for axis, traffic in record["communication"].items():
            assert traffic["exposed_s"] == pytest.approx(
                sum(event.exposed for event in comm if event.axis == axis), abs=1e-6
            )
            assert 0 < traffic["exposed_s"] < record["step_time_s"]


def test_the_tables_agree_with_the_metrics_and_with_each_other(job_run: FinishedJob) -> None:
    query = job_run.query
    logged = [(record["step"], record["loss"], record["grad_norm"]) for record in job_run.steps]
    for rank in range(2):
        assert query(f"SELECT step, loss, grad_norm FROM steps WHERE rank = {rank} ORDER BY step") == logged
    evaluated = query("SELECT DISTINCT step FROM steps WHERE tags LIKE '%evaluation%' ORDER BY step")
    assert evaluated == [(step,) for step in EVALUATED]
    assert query("SELECT rank, tp, world FROM ranks ORDER BY rank") == [(0, 0, 2), (1, 1, 2)]
    # the same sums, from single events
    sums = "sum(end_ns - start_ns)::BIGINT, sum(exposed_ns)::BIGINT, sum(bytes)::BIGINT"
    events = query(f"SELECT rank, step, axis, name, chunk, {sums} FROM events WHERE step > 0 GROUP BY ALL ORDER BY ALL")
    sums = "sum(total_ns)::BIGINT, sum(exposed_ns)::BIGINT, sum(bytes)::BIGINT"
    parts = f"SELECT rank, step, axis, name, chunk, {sums} FROM step_parts WHERE step > 0 AND axis <> 'step'"
    assert query(f"{parts} GROUP BY ALL ORDER BY ALL") == events and len(events) > STEPS * 2 * 5
    # a step's actions and waits lie in its time
    assert query(
        """
        SELECT count(*) FROM events JOIN steps USING (rank, step)
        WHERE axis = 'compute' AND NOT events.start_ns BETWEEN steps.start_ns AND steps.end_ns"""
    ) == [(0,)]
    [(records,)] = query("SELECT list(record ORDER BY rank) FROM states")
    states = [json.loads(text) for text in records]
    assert [(state["step"], state["phase"]) for state in states] == [(STEPS, "done")] * 2
    assert query("SELECT sum(events_lost) FROM steps") == [(0,)]


def copy_of(job_run: FinishedJob, folder: Path) -> tuple[Path, Path]:
    """Copy a run. Returns the configuration and the run's folder."""
    shutil.copytree(job_run.config.parent, folder / "copy")
    config = job_config(folder / "copy", SIZES, **RUN)
    return config, config.parent / "runs" / "test"


def stored_files(folder: Path) -> set[Path]:
    """The files of what ranks did in steps."""
    tables = ("events", "step_parts", "steps")
    return {path.relative_to(folder) for table in tables for path in (folder / "events" / table).glob("*.parquet")}


@pytest.mark.slow
def test_without_observe_events_the_store_has_sums_alone(job_run: FinishedJob, tmp_path: Path) -> None:
    config, folder = copy_of(job_run, tmp_path)
    finish(config, "observe.store_events=false", "parallel.tp=1", f"train.steps={STEPS + 1}")
    new = stored_files(folder) - stored_files(job_run.folder)
    assert {path.parts[1] for path in new} == {"steps", "step_parts"}


@pytest.mark.slow
def test_without_observe_record_there_are_no_events_and_no_traffic(job_run: FinishedJob, tmp_path: Path) -> None:
    config, folder = copy_of(job_run, tmp_path)
    recorded = finish(config, f"train.steps={STEPS + 1}", "checkpoint.every=0")
    unrecorded = finish(config, f"train.steps={STEPS + 1}", "checkpoint.every=0", "observe.record_events=false")
    assert all(not rank.events for rank in read(folder))
    assert "communication" in recorded[-1] and "communication" not in unrecorded[-1]
    assert recorded[-1]["loss"] == unrecorded[-1]["loss"]


@pytest.mark.parametrize(
    ("override", "status"), [("train.log_every=1", Exit.OK), ("model.ffn_size=64", Exit.CHECKPOINT)]
)
@pytest.mark.slow
def test_a_run_without_steps_keeps_the_store(override: str, status: Exit, job_run: FinishedJob, tmp_path: Path) -> None:
    """Two cases: the run is complete, and the checkpoint belongs to another model."""
    config, folder = copy_of(job_run, tmp_path)
    exit_status, _, err = Job(config, "parallel.tp=1", override).end()
    assert exit_status == status, err
    assert stored_files(folder) == stored_files(job_run.folder) != set()


@pytest.mark.slow
def test_a_stopped_job_has_stored_all_events(tmp_path: Path) -> None:
    job = Job(job_config(tmp_path, SIZES, **RUN | {"train__steps": 100_000}))
    job.wait_for_step(2)
    job.signal(signal.SIGTERM)
    status, _, err = job.end()
    assert status == Exit.STOPPED, err
    last = job.steps()[-1]["step"]
    ranks = read(job.folder)
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert max(event.step for event in rank.events) == last


@pytest.mark.slow
def test_a_failed_job_has_stored_all_events(tmp_path: Path) -> None:
    """The weights diverge: the run ends with an error, and the store has all events until then."""
    job = Job(job_config(tmp_path, SIZES, **RUN | {"optimizer__lr": 1e30, "train__steps": 100, "checkpoint__every": 0}))
    status, _, err = job.end()
    assert status == Exit.DO_NOT_REQUEUE, err
    ranks = read(job.folder)
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert {event.step for event in rank.events} == set(range(len(job.steps()) + 2))
