"""Rules for the number of processes."""

from __future__ import annotations

from collections.abc import Iterator

from megascale.config.exclusions import HYBRID, NOT_HYBRID
from megascale.config.finding import Finding, divisors
from megascale.config.parallel_rules import (
    balance_group,
    expert_parallel,
    hybrid_sharding,
    hybrid_tokens,
    skipped_stages,
)
from megascale.config.rules import Rule, run_rules
from megascale.config.run import RunConfig
from megascale.config.time_rules import unknown_ranks
from megascale.config.train_rules import batch_rampup, batch_size

WORLD_KEYS = ("parallel.dp", "parallel.tp")
"""Keys of findings about the number of processes itself."""


def world_findings(config: RunConfig, world_size: int) -> Iterator[Finding]:
    """Check the layout, the batch and injected faults against the number of processes."""
    parallel, dp, replica = config.parallel, config.parallel.dp, config.parallel.replica_size
    shape = f"tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp}"
    micro_batches, uneven = divmod(config.batch.total, config.batch.micro)
    if isinstance(dp, int):
        if replica * dp != world_size:
            divides = world_size % replica == 0 and (uneven or micro_batches % (world_size // replica) == 0)
            hint = f"dp = {world_size // replica}" if divides else f"start {replica * dp} processes"
            message = f"{shape} x dp {dp} = {replica * dp}, but there are {world_size} processes"
            yield Finding("parallel.dp", message, hint)
        return
    yield from unknown_ranks(config.fault, world_size)  # else a rule has
    if world_size % replica:
        sizes = range(1, world_size + 1) if uneven else divisors(micro_batches)
        below = [size for size in sizes if size * replica <= world_size][-1:]
        above = [size for size in sizes if size * replica >= world_size][:1]
        processes = f"{world_size} {'processes are' if world_size > 1 else 'process is'}"
        near = " or ".join(str(replica * size) for size in sorted({*below, *above}))
        why = "" if uneven else f": dp divides the {micro_batches} micro-batches of a step"
        yield Finding("parallel.tp", f"{processes} not a multiple of {shape} = {replica}", f"start {near}{why}")
        return
    yield from layout_findings(config.resolve(world_size))


def layout_findings(config: RunConfig) -> Iterator[Finding]:
    """Check again what depends on dp, for a resolved configuration."""
    again: tuple[Rule, ...] = (
        NOT_HYBRID, hybrid_tokens, HYBRID, expert_parallel, hybrid_sharding, balance_group,
    )  # fmt: skip
    if not config.batch.total % config.batch.micro:  # else the rule `batch_size` has reported
        again += (batch_size, batch_rampup, skipped_stages)
    yield from run_rules(again, dict(config))
