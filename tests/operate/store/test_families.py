"""The families of ranks, hosts and jobs: names by Prometheus' conventions, and values."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lab.simulation import Simulation
from megascale.config.fault import FaultConfig
from megascale.operate.driver.job_families import job_families
from megascale.operate.driver.job_state import JobPlan
from megascale.operate.store.collector import Collector
from megascale.operate.store.families import MetricFamily
from megascale.operate.store.host_families import host_families, split_device
from megascale.operate.store.rank_families import rank_families
from megascale.record.log import LogIdentity, open_log
from tests.operate.store.every_metric import LABELS, every_family, host_sample, played_ranks

NO_UNITS = ("_ms", "_us", "_ns", "_percent", "_mhz", "_mb", "_gb", "_kb", "milliseconds", "megabytes", "percent")


def by_name(families: list[MetricFamily]) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {family.name: family.samples for family in families}


def test_names_and_labels_follow_the_conventions(tmp_path: Path) -> None:
    families = every_family(tmp_path)
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", family.name), family.name
        assert not family.name.endswith(NO_UNITS), family.name
        assert not family.name.endswith("_total"), family.name  # counters get it in the text, gauges must not have it
        assert family.help and not family.help.endswith(".")
        keys = [frozenset(labels.items()) for labels, _ in family.samples]
        assert len(keys) == len(set(keys)), family.name
        for labels, _ in family.samples:
            assert {"run", "node"} <= labels.keys()
            assert not labels.keys() & {"step", "time", "pid", "attempt"}, family.name
        if family.kind == "counter":
            assert all(value >= 0 for _, value in family.samples)


def test_the_state_of_ranks(tmp_path: Path) -> None:
    collector, ranks = played_ranks(tmp_path)
    found = by_name(rank_families(collector, LABELS))
    for rank in (0, 1):
        of_rank = LABELS | {"rank": str(rank)}
        assert (of_rank | {"phase": "step"}, 1) in found["rank_phase"]
        assert (of_rank, 1) in found["rank_step"]
        assert (of_rank, 0.5) in found["rank_step_time_seconds"]
        assert (of_rank, 1.0) in found["rank_compute_seconds"]
        assert (of_rank | {"activity": "data"}, 1.0) in found["rank_host_seconds"]
        assert (of_rank, 0.75) in found["rank_train_seconds"]
        place = {"tp": str(rank), "cp": "0", "dp": "0", "pp": "0", "ep": "0", "dp_shard": "0"}
        assert (of_rank | place, 1) in found["rank_info"]
    assert found["loss"] == [(LABELS, 2.5)]
    assert found["tokens"] == [(LABELS, 4096)]
    assert found["peak_flops_per_second"] == [(LABELS, 2e12)]
    assert found["world_size"] == [(LABELS, 2)]
    ranks[0].log.count("spikes")
    assert by_name(rank_families(collector, LABELS))["spike_alerts"] == [(LABELS, 1)]


def test_a_rank_that_has_ended_has_no_series_and_a_stopped_one_has(tmp_path: Path) -> None:
    path = tmp_path / "rank.flight"
    script = (
        "import sys; from pathlib import Path; from megascale.record.log import *;"
        "open_log(LogIdentity('r', 1, 2), Path(sys.argv[1])); print(1, flush=True); input()"
    )
    rank = subprocess.Popen([sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None
        rank.stdout.readline()
        collector = Collector({1: path, 2: tmp_path / "absent"}, print)
        collector.poll()
        assert list(collector.live_states()) == [1]
    finally:
        rank.kill()
        rank.wait()
    assert path.exists()
    assert collector.live_states() == {}


def test_a_host_without_rank_0_says_how_many_ranks_there_should_be(tmp_path: Path) -> None:
    """The alert about missing ranks is also about rank 0."""
    path = tmp_path / "rank.flight"
    open_log(LogIdentity("r", 3, 4), path).begin_step(1)
    collector = Collector({3: path}, print)
    collector.poll()
    found = by_name(rank_families(collector, LABELS))
    assert found["world_size"] == [(LABELS, 4)]
    assert "loss" not in found


def test_a_rank_whose_events_are_not_stored_has_its_state(tmp_path: Path) -> None:
    path = tmp_path / "rank.flight"
    record = open_log(LogIdentity("r", 0, 1), path)
    record.begin_step(3)
    collector = Collector({0: path}, print)
    collector.poll()
    found = by_name(rank_families(collector, LABELS))
    assert found["rank_step"] == [(LABELS | {"rank": "0"}, 3)]
    assert "rank_compute_seconds" not in found
    assert "rank_step_time_seconds" not in found  # no step has ended


def test_every_metric_of_a_host_is_exported_with_its_unit() -> None:
    sample = host_sample()
    families = host_families(sample, LABELS)
    assert sum(len(family.samples) for family in families) == len(sample)
    found = by_name(families)
    gpu, port = LABELS | {"gpu": "0"}, LABELS | {"device": "mlx5_0", "port": "1"}
    assert found["gpu_sm_clock_hertz"] == [(gpu, 2e6)]
    assert found["gpu_utilization_ratio"] == [(gpu, 0.02)]
    assert found["infiniband_transmitted_bytes"] == [(port, 8.0)]
    assert 0 <= found["host_cpu_utilization_ratio"][0][1] <= 1
    assert {labels["filesystem"] for labels, _ in found["host_filesystem_free_bytes"]} == {"shm", "run"}


@pytest.mark.parametrize(
    ("metric", "name", "device"),
    [
        ("gpu11.memory.used", "gpu.memory.used", "gpu11"),
        ("infiniband.mlx5_0.1.port_xmit_data", "infiniband.port_xmit_data", "mlx5_0.1"),
        ("disk.shm.free", "disk.free", "shm"),
        ("cpu.percent", "cpu.percent", ""),
    ],
)
def test_devices_of_metrics(metric: str, name: str, device: str) -> None:
    assert split_device(metric) == (name, device)


def test_nodes_and_incidents_of_a_job() -> None:
    sim = Simulation(JobPlan("r", 4, 16, (), "/logs", revivable=False), FaultConfig(), 1)
    sim.run(1000.0)
    labels = {"run": "r", "node": "driver"}
    found = by_name(job_families(sim.job, sim.now, labels))
    states = {one["state"]: value for one, value in found["job_nodes"]}
    assert states == {"training": 4, "spare": 1, "excluded": 0, "missing": 0}
    assert {value for _, value in found["job_incidents"]} == {0}  # the first must be an increase
    assert found["job_attempts"] == [(labels, 1)]
    sim.fail_rank(3)
    sim.run(sim.now + 300)
    found = by_name(job_families(sim.job, sim.now, labels))
    assert (labels | {"class": "process"}, 1) in found["job_incidents"]
    assert sum(value for _, value in found["job_actions"]) == 1
    assert found["job_attempts"] == [(labels, 2)]
    assert found["job_recovery_seconds"][0][1] > 0
    (one,) = sim.job.history.incidents.values()
    assert one.recovered is not None
    twin = replace(one, id=one.id + 1, since=one.since - 10, steps_lost=7)
    sim.job.history.incidents |= {one.id: replace(one, steps_lost=7), twin.id: twin}  # the same step ended both
    again = by_name(job_families(sim.job, sim.now, labels))
    assert again["job_steps_lost"] == [(labels, 7)]
    assert again["job_recovery_seconds"] == [(labels, one.recovered - one.since + 10)]
    for _ in range(2):  # and there is one spare
        sim.lose_node(sim.job.used[0])
        sim.run(sim.now + 30)
    states = {one["state"]: value for one, value in by_name(job_families(sim.job, sim.now, labels))["job_nodes"]}
    assert states["missing"] >= 1
