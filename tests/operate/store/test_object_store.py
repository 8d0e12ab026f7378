"""Event stores in an object store: an S3 server on this host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.fleet import Fleet
from lab.fleet_tables import write_store
from lab.fleet_times import FleetFault, FleetLayout
from megascale.core.storage import Location
from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow.findings import findings
from megascale.operate.store.collector import Collector
from megascale.operate.store.node_store import FAN_IN
from megascale.operate.store.query import open_store
from megascale.operate.store.table_files import list_files
from tests.jobs import Job, job_config
from tests.operate.store.played_ranks import PlayedRank
from tests.runs import GPT
from tests.s3_server import FailingStore, s3_server


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingStore]:
    with s3_server() as (server, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.slow
def test_a_collector_writes_and_merges_there_and_waits_while_it_fails(bucket: FailingStore, tmp_path: Path) -> None:
    url, said = "s3://bucket/stores/run", list[str]()
    rank = PlayedRank(tmp_path, 0, url)
    collector = Collector({0: rank.path}, said.append)
    for step in range(1, FAN_IN + 3):
        bucket.failing_share = 1.0 if step == FAN_IN else 0.0  # a merge reads the files
        rank.compute(step, "F", 1.0, 2.0)
        rank.end_step(step)
        collector.poll()
        collector.read_states()
        collector.write()
    assert len(list_files(Location(url, retry_s=0), "steps")) < FAN_IN
    store = open_store(url)
    assert [step for (step,) in store.execute("SELECT step FROM steps ORDER BY step").fetchall()] == [
        *range(1, FAN_IN + 3)
    ]
    assert store.execute("SELECT rank, tp FROM ranks").fetchall() == [(0, 0)]
    assert store.execute("SELECT count(*) FROM states").fetchall() == [(1,)]
    assert [line.partition(": ")[0] for line in said] == ["WARNING"]
    assert f"the event store {url} cannot be written" in said[0]


@pytest.mark.slow
def test_the_findings_are_those_of_a_folder(bucket: FailingStore, tmp_path: Path) -> None:
    fleet = Fleet(FleetLayout(Topology(tp=2, pp=2, dp=2), node_ranks=4), fault=FleetFault("slow", rank=5, factor=1.2))
    write_store(fleet, tmp_path)
    for path in sorted((tmp_path / "events").rglob("*.parquet")):
        Location(f"s3://bucket/run/events/{path.relative_to(tmp_path / 'events')}").write(path.read_bytes())
    found = findings(open_store("s3://bucket/run"))
    assert [each.culprit.ranks for each in found] == [(5,)]
    assert found == findings(open_store(tmp_path))


@pytest.mark.slow
def test_a_job_keeps_its_events_there(bucket: FailingStore, tmp_path: Path) -> None:
    stored = {"observe__event_store": True, "observe__store_dir": "s3://bucket/jobs", "observe__store_interval_s": 1.0}
    job = Job(job_config(tmp_path, GPT, train__steps=6, **stored))
    status, _, err = job.end()
    assert status == 0, err
    steps = open_store(job.folder).execute("SELECT step, loss FROM steps ORDER BY step").fetchall()
    assert steps == [(record["step"], record["loss"]) for record in job.steps()]
    assert not (job.folder / "events" / "steps").exists()
