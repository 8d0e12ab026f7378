"""Every metric that megascale exports: families of played ranks, a host with all devices, and a simulated job."""

from __future__ import annotations

from pathlib import Path

from lab.simulation import Simulation
from megascale.config.fault import FaultConfig
from megascale.operate.driver.job_families import job_families
from megascale.operate.driver.job_state import JobPlan
from megascale.operate.health.host_metrics import HostMetrics
from megascale.operate.node.agent_exporter import DRIVER_LOST
from megascale.operate.store.collector import Collector
from megascale.operate.store.families import PREFIX, MetricFamily
from megascale.operate.store.host_families import host_families
from megascale.operate.store.rank_families import rank_families
from tests.operate.store.played_ranks import PlayedRank

LABELS = {"run": "r", "node": "n0"}

GPU = (
    "percent", "memory.used", "temperature", "power_w", "clock_mhz", "throttle", "pcie_width", "ecc_uncorrected", "xid",
    "last_xid", "lost",
)  # fmt: skip
PORT = (
    "port_xmit_data",
    "port_rcv_data",
    "port_xmit_wait",
    "symbol_error",
    "link_downed",
    "link_error_recovery",
    "active",
)


def played_ranks(folder: Path) -> tuple[Collector, list[PlayedRank]]:
    """Return a collector that has drained two ranks, which have trained a step and saved."""
    ranks = [PlayedRank(folder, rank, folder / "store") for rank in (0, 1)]
    for rank in ranks:
        rank.log.begin_step(1)
        rank.compute(1, "F", 1.0, 2.0)
        rank.communicate(1, 0, 1.0, 1.5)
        rank.log.write_activity("data", 1, 0.0, 1.0, 1.0)
        rank.end_step(1)
        rank.log.end_step(0.5, {"loss": 2.5, "grad_norm": 1.5})
        for name in ("spikes", "skipped_steps", "checkpoint_failures"):
            rank.log.count(name, 0)
        for name in ("checkpoint_step", "checkpoint_time"):
            rank.log.set_total(name, 1)
    collector = Collector({rank.rank: rank.path for rank in ranks}, print)
    collector.poll()
    return collector, ranks


def host_sample() -> dict[str, float]:
    """Return a sample of this host, as if it had GPUs, ports of InfiniBand and cards that count pause frames."""
    more = [f"gpu0.{name}" for name in GPU] + [f"infiniband.mlx5_0.1.{name}" for name in PORT] + ["network.pause"]
    return HostMetrics(Path.cwd()).sample() | dict.fromkeys(more, 2.0)


def every_family(folder: Path) -> list[MetricFamily]:
    """Return all families."""
    collector, _ = played_ranks(folder)
    job = Simulation(JobPlan("r", 2, 4, (), "/logs"), FaultConfig(), 1)
    job.run(100.0)
    lost = MetricFamily("agent_driver_lost_seconds", "gauge", DRIVER_LOST, [(LABELS, 0.0)])
    ranks, host = rank_families(collector, LABELS), host_families(host_sample(), LABELS)
    return [*ranks, *host, *job_families(job.job, job.now, LABELS), lost]


def every_name(folder: Path) -> set[str]:
    """Return the names of all metrics, as Prometheus has them."""
    return {f"{PREFIX}{one.name}{'_total' if one.kind == 'counter' else ''}" for one in every_family(folder)}
