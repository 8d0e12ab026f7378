"""Checks beyond the configuration, for `megascale check`: a plug-in's schedule, limits of this host, and datasets."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.catalog.schedules import SCHEDULES
from megascale.cli.check_data import RANKS_OF_HOST
from megascale.config.run import RunConfig
from megascale.config.run_warnings import run_warnings
from megascale.data.read.identity import replaced_datasets
from megascale.layout.chunks import stages_of
from megascale.layout.gpu_overlap import exposed_collectives
from megascale.operate.node.host_limits import datasets_by_split, limit_findings, memory_findings
from megascale.plan.account.memory import JobMemory
from megascale.schedule.lower import compute_order

CHECKED = 20_000  # forwards of a plug-in's schedule that are checked: a second


def check_plug_in_schedule(config: RunConfig) -> None:
    """Check the schedule of another package with the run's micro-batches, or fewer with the same remainder by pipeline
    ranks. Tests prove the others.

    Raises: ConfigError
    """
    name, m = config.parallel.schedule, config.num_microbatches
    if name is None or SCHEDULES[name].built_in:
        return
    placement = stages_of(config.model, config.parallel).placement
    few = max(2 * placement.p, CHECKED // placement.count)
    compute_order(name, placement, m if m < few else few + (m - few) % placement.p)


def host_warnings(config: RunConfig) -> Iterator[str]:
    """Describe what is hardly meant (`config.run_warnings`), collectives that GPUs leave exposed in 16 bits and FP8,
    limits of this host that a run would exceed here, and datasets that were replaced since the run's last start. The
    hosts of the run may have other limits.
    """
    ranks = min(config.world_size, RANKS_OF_HOST)
    datasets, saves = datasets_by_split(config.data, config.train.eval_every), bool(config.checkpoint.every)
    findings = list(limit_findings(datasets, config.world_size, ranks, saves=saves))
    if config.checkpoint.in_memory_every:
        findings += memory_findings(config.checkpoint, ranks, JobMemory(config).fullest().optimizer)
    yield from run_warnings(config)
    if config.train.element_bytes[0] == 2:
        yield from map(str, exposed_collectives(config, RANKS_OF_HOST))
    for finding in findings:
        yield str(finding.problem("this host"))
    if config.checkpoint.resume != "never":
        yield from replaced_datasets(config.data, config.folder)
