"""The stage of a pipeline whose ranks hold most, exact, without dry-running all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megascale.config.run import RunConfig
from megascale.dryrun.run import DryRun, dry_run
from megascale.layout.topology import Coord, Topology

TOLERANCE = 0.02
"""By how much formulas are off for models worth a plan (`tests/plan/test_against_dry_run.py`, docs/memory.md)."""


def fullest_stages(config: RunConfig, expected: Sequence[int]) -> Iterator[DryRun]:
    """Dry runs of the first rank of stages, those with most `expected` bytes first, until no other can hold more than
    the fullest that was found.
    """
    p = config.parallel
    topology, most = Topology(tp=p.tp, cp=p.cp, dp=config.dp, pp=p.pp), 0
    for stage in sorted(range(p.pp), key=lambda stage: -expected[stage]):
        if expected[stage] * (1 + TOLERANCE) < most:
            return
        found = dry_run(config, topology.rank(Coord(0, 0, 0, stage)))
        most = max(most, found.peak.total())
        yield found
