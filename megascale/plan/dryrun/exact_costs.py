"""Exact memory, FLOPs and communication of a job's fullest pipeline stages, from dry runs, as JSON for a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megascale.config.run import RunConfig
from megascale.layout.topology import Coord, topology_of
from megascale.plan.dryrun.dry_run import DryRun, dry_run
from megascale.plan.dryrun.resource_counter import MEMORY_KINDS

TOLERANCE = 0.05  # largest relative error of the memory estimates (docs/memory.md)


def exact_costs(config: RunConfig, expected: Sequence[int]) -> dict[str, Any]:
    """Dry-run the first rank of stages of a resolved configuration, in descending order of `expected`, the estimated
    bytes of every stage, until no other can exceed the highest peak, given TOLERANCE.

    Returns: `memory_bytes`: peak bytes of the fullest rank by kind; `memory_bytes_by_stage`: exact where dry-run, else
    the estimate; `exact_stages`: the stages that were dry-run; `ranks`: `rank_costs` of these stages.
    """
    topology, runs, highest = topology_of(config.parallel), dict[int, DryRun](), 0
    for stage in sorted(range(topology.pp), key=lambda stage: -expected[stage]):
        if expected[stage] * (1 + TOLERANCE) < highest:
            break
        runs[stage] = dry_run(config, topology.rank(Coord(pp=stage)))
        highest = max(highest, runs[stage].peak.total())
    fullest = max(runs.values(), key=lambda run: run.peak.total())
    return {
        "fullest_stage": fullest.coord.pp,
        "memory_bytes": memory_by_kind(fullest),
        "memory_bytes_by_stage": [
            runs[stage].peak.total() if stage in runs else size for stage, size in enumerate(expected)
        ],
        "exact_stages": sorted(runs),
        "ranks": [rank_costs(runs[stage]) for stage in sorted(runs)],
    }


def memory_by_kind(run: DryRun) -> dict[str, int]:
    """Bytes by kind at the memory peak, and their total."""
    return {**{kind: run.peak[kind] for kind in MEMORY_KINDS}, "total": run.peak.total()}


def rank_costs(run: DryRun) -> dict[str, Any]:
    """A rank's memory peak in bytes, FLOPs by operator, and calls and bytes by group and operation."""
    calls, sizes = Counter[str](), Counter[str]()
    for call in run.calls:
        name = f"{call.group} {call.operation}"
        calls[name] += 1
        sizes[name] += call.bytes
    return {
        "rank": run.rank,
        "stage": run.coord.pp,
        "memory_bytes": memory_by_kind(run),
        "flops": dict(run.flops),
        "communication": {name: {"calls": calls[name], "bytes": sizes[name]} for name in sorted(calls)},
    }
