"""The planner of hybrid data parallelism (`plan_hybrid`): from lengths alone, so that all ranks find the same plan.

Sequences of at most `max_tokens` are packed and never leave a rank, without context communication. Longer ones are
shared by a ring of as many ranks as they need, any number, in the pool of dp x cp ranks (ByteScale, Ge et al. 2025;
groups of different sizes as in FlexSP, Wang et al. 2025). Tokens are limited per micro-batch for memory, seconds are
balanced per step for time. Rings wider than memory asks for are tried too, and taken if the step is 1% shorter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megascale.core.errors import DataError
from megascale.layout.hybrid.balance import Packs, balance_by_dp, balance_by_pp
from megascale.layout.hybrid.plan import HybridPlan, PlannedBatch
from megascale.layout.hybrid.rings import Rings, place_rings
from megascale.layout.hybrid.sequence_work import SequenceWork

WIDTHS = (1.0, 0.5, 0.25, 0.125)
"""Most seconds of a rank in a ring, over the bound: from rings as narrow as they can be to wider ones."""

CLOSE = 1.02  # A makespan over the bound that ends the search
GAIN = 0.99  # share of the makespan that a plan with wider rings must reach to be taken


def plan_hybrid(lengths: Sequence[int], pool: int, max_tokens: int, work: SequenceWork, stages: int = 1) -> HybridPlan:
    """Plan a step of sequences of these lengths, in tokens, on a pool of dp x cp ranks, each with `stages` pipeline
    stages behind it. `work`: seconds of one stage.

    Raises: DataError for a sequence that exceeds the pool, and for one without tokens
    """
    check_lengths(lengths, pool, max_tokens)
    ordered = sorted(enumerate(lengths), key=lambda sequence: (-sequence[1], sequence[0]))
    long = [sequence for sequence in ordered if sequence[1] > max_tokens]
    short = ordered[len(long) :]
    times = [*map(work.whole, lengths)]
    bound = makespan_bound(lengths, pool, max_tokens, work, stages)
    rings = _choose_rings(long, pool, max_tokens, work, stages, bound)
    packs = balance_by_dp(short, times, rings, max_tokens, stages)
    if stages > 1:
        by_pp = balance_by_pp(short, times, rings, max_tokens, stages)
        packs = by_pp if by_pp.makespan < packs.makespan else packs
    return HybridPlan(tuple(lengths), max_tokens, packs.balance, _microbatches(rings, packs), packs.makespan, bound)


def _choose_rings(
    long: Sequence[tuple[int, int]], pool: int, max_tokens: int, work: SequenceWork, stages: int, bound: float
) -> Rings:
    """Choose the narrowest rings that leave the time of a step close to the bound."""
    best, least = Rings((), (0.0,) * pool, (0.0,) * pool), math.inf
    for width in WIDTHS if long else ():
        rings = place_rings(long, pool, max_tokens, work, width * bound, bound)
        ends = [ready + (stages - 1) * longest for ready, longest in zip(rings.ready, rings.longest, strict=True)]
        taken = sum(ring.ranks * ring.seconds for row in rings.rows for ring in row)
        rest = max(0.0, bound * pool - taken)  # of the sequences that fit a rank
        last = max(*ends, (sum(ends) + rest) / pool)
        if last < GAIN * least:
            best, least = rings, last
        if last <= CLOSE * bound:
            break
    return best


def makespan_bound(lengths: Sequence[int], pool: int, max_tokens: int, work: SequenceWork, stages: int = 1) -> float:
    """Bound the seconds of a step from below, for any plan and without communication.

    A pipeline takes its micro-batches, and p - 1 times the longest of them. Over the pool the former sum to all work;
    the latter to no less than a sequence's work, since a ring of D ranks has 1 / D of it on each. A sequence that fits
    a rank takes its time on each of the p stages.
    """
    times = [*map(work.whole, lengths)]
    fitting = max((time for time, length in zip(times, lengths, strict=True) if length <= max_tokens), default=0.0)
    return max((sum(times) + (stages - 1) * max(times)) / pool, stages * fitting)


def check_lengths(lengths: Sequence[int], pool: int, max_tokens: int) -> None:
    """Raises: DataError for a step without sequences, and for sequences that are empty or exceed the pool."""
    if not lengths or min(lengths) < 1:
        number = next((i for i, n in enumerate(lengths) if n < 1), None)
        what = "the step has no sequences" if number is None else f"sequence {number} has {lengths[number]} tokens"
        raise DataError(what, hint="a step needs sequences of one token or more")
    if (longest := max(lengths)) > pool * max_tokens:
        what = (
            f"sequence {list(lengths).index(longest)} has {longest:,} tokens, {pool} ranks hold {pool * max_tokens:,}"
        )
        raise DataError(what, hint=f"use {-(-longest // max_tokens)} ranks, or more tokens per rank")


def _microbatches(rings: Rings, packs: Packs) -> tuple[tuple[PlannedBatch, ...], ...]:
    """List the micro-batches of every rank: its rings, then its packs."""
    batches: list[list[PlannedBatch]] = [[] for _ in rings.ready]
    for row in rings.rows:
        first = 0
        for ring in row:
            batch = PlannedBatch((ring.sequence,), first, ring.ranks)
            for rank in range(first, first + ring.ranks):
                batches[rank].append(batch)
            first += ring.ranks
    for rank, own in enumerate(packs.packs):
        batches[rank] += [PlannedBatch(pack, rank) for pack in own]
    return tuple(map(tuple, batches))
