"""Search for the pipeline stage with the highest memory peak, with few dry runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megascale.config.run import RunConfig
from megascale.layout.topology import Coord, topology_of
from megascale.plan.dryrun.dry_run import DryRun, dry_run

TOLERANCE = 0.05
"""Largest relative error of the memory estimates (docs/memory.md)."""


def peak_memory_stages(config: RunConfig, expected: Sequence[int]) -> Iterator[DryRun]:
    """Dry-run the first rank of stages in descending order of `expected` bytes.

    Stops when no remaining stage can exceed the highest peak, given TOLERANCE.
    """
    topology, highest_peak = topology_of(config), 0
    for stage in sorted(range(topology.pp), key=lambda stage: -expected[stage]):
        if expected[stage] * (1 + TOLERANCE) < highest_peak:
            return
        run = dry_run(config, topology.rank(Coord(pp=stage)))
        highest_peak = max(highest_peak, run.peak.total())
        yield run
