"""The stage of a pipeline whose ranks hold most, exact, without dry-running all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megascale.config.run import RunConfig
from megascale.dryrun.run import DryRun, dry_run
from megascale.layout.topology import Coord, topology_of

TOLERANCE = 0.05
"""The part of a rank's bytes by which formulas are off at most (docs/memory.md)."""


def fullest_stages(config: RunConfig, expected: Sequence[int]) -> Iterator[DryRun]:
    """Dry runs of the first rank of stages, those with most `expected` bytes first, until no other can hold more than
    the fullest that was found.
    """
    topology, most = topology_of(config), 0
    for stage in sorted(range(topology.pp), key=lambda stage: -expected[stage]):
        if expected[stage] * (1 + TOLERANCE) < most:
            return
        found = dry_run(config, topology.rank(Coord(pp=stage)))
        most = max(most, found.peak.total())
        yield found
