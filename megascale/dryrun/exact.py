"""What dry runs say of a job, for a plan: the fullest stage, and each rank that was run."""

from __future__ import annotations

from collections import Counter
from typing import Any

from megascale.config.run import RunConfig
from megascale.dryrun.account import KINDS
from megascale.dryrun.run import DryRun
from megascale.dryrun.stages import fullest_stages


def exact(config: RunConfig, expected: list[int]) -> dict[str, Any]:
    """Of a resolved configuration. `expected`: bytes of each pipeline stage, as formulas have them.

    `memory_bytes`: of the fullest rank by kind, when they are most; `exact_stages`: those that were run; `ranks`: of
    each of them its rank, bytes, FLOPs of the step by operator, and calls and bytes by group and operation.
    """
    runs = {run.coord.pp: run for run in fullest_stages(config, expected)}
    fullest = max(runs.values(), key=lambda run: run.peak.total())
    return {
        "fullest_stage": fullest.coord.pp,
        "memory_bytes": kinds(fullest),
        "memory_bytes_by_stage": [
            runs[stage].peak.total() if stage in runs else size for stage, size in enumerate(expected)
        ],
        "exact_stages": sorted(runs),
        "ranks": [of_rank(runs[stage]) for stage in sorted(runs)],
    }


def kinds(run: DryRun) -> dict[str, int]:
    """Bytes at the rank's peak."""
    return {**{kind: run.peak[kind] for kind in KINDS}, "total": run.peak.total()}


def of_rank(run: DryRun) -> dict[str, Any]:
    """A rank's step."""
    calls, sizes = Counter[str](), Counter[str]()
    for call in run.calls:
        name = f"{call.group} {call.operation}"
        calls[name] += 1
        sizes[name] += call.bytes
    return {
        "rank": run.rank,
        "stage": run.coord.pp,
        "memory_bytes": kinds(run),
        "flops": dict(run.flops),
        "communication": {name: {"calls": calls[name], "bytes": sizes[name]} for name in sorted(calls)},
    }
