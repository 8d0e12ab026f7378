"""Steps of sequences of unequal lengths: on a static cp mesh, by hybrid data parallelism, in chunks (`LengthStep`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

from megascale.layout.hybrid.plan import HybridPlan, PlannedBatch
from megascale.layout.hybrid.planner import makespan_bound, plan_hybrid
from megascale.layout.hybrid.sequence_work import SequenceWork
from megascale.layout.packs import deal, pack_sequences
from megascale.layout.sequence_chunks import SequenceChunk, cut_chunks
from megascale.layout.stages import looped
from megascale.plan.simulate.event_simulator import StageTimes, simulate
from megascale.plan.simulate.profiles import Overlaps
from megascale.schedule.lower import compute_order
from megascale.schedule.state_aware import build_state_aware

SIMULATED = 4  # slowest pipelines by their sums that are simulated


@dataclass(frozen=True)
class LengthStep:
    """A step. `makespan`: seconds until the slowest pipeline is done; `rings`: tokens that ranks share, and the number
    of ranks; `microbatches`: fewest and most of a pipeline; `padding`: rows of padding of all ranks.
    """

    makespan: float
    rings: Sequence[tuple[int, int]]
    microbatches: tuple[int, int]
    padding: int = 0


@dataclass(frozen=True)
class Pool:
    """The dp x cp ranks of a job. `work`: of a stage, of `stages`; `forward`: the forward's share of time; `message`:
    seconds of a message between stages, for `max_tokens`; `step`: of numbers of rows, as in
    `layout.hybrid.plan.with_padding`.
    """

    ranks: int
    max_tokens: int
    work: SequenceWork
    stages: int = 1
    forward: float = 1 / 3
    message: float = 0.0
    step: int = 1

    def bound(self, lengths: Sequence[int]) -> float:
        """Bound the makespan of any plan: equal work on all ranks, without communication."""
        return makespan_bound(lengths, self.ranks, self.max_tokens, self.work, self.stages)

    def pipeline(
        self, seconds: Sequence[float], tokens: Sequence[int], chunks: Sequence[int] = (), keep: int = 1
    ) -> float:
        """Simulate 1F1B of micro-batches of unequal times and lengths; with `chunks`, the numbers of micro-batches that
        depend on each other, state-aware 1F1B.
        """
        if self.stages == 1 and not chunks:
            return sum(seconds)
        placement = looped(self.stages, 1)
        if chunks:
            order = build_state_aware(self.stages, chunks, keep)
        else:
            order = compute_order("1f1b", placement, len(seconds))
        places = [(stage, 0) for stage in range(self.stages)]
        scales = [(taken, n / self.max_tokens) for taken, n in zip(seconds, tokens, strict=True)]
        forward, backward = dict.fromkeys(places, self.forward), dict.fromkeys(places, 1 - self.forward)
        times = StageTimes(forward, backward, self.message, 0.0, {}, {}, scales=scales)
        return simulate(order, placement, times, Overlaps(tp="none", pp=True, dp=True)).last


def hybrid_step(lengths: Sequence[int], pool: Pool) -> tuple[LengthStep, HybridPlan]:
    """Plan a step by hybrid data parallelism, and time it with the padding of its rows, which is a document of its own;
    its pipelines are simulated.
    """
    plan = plan_hybrid(lengths, pool.ranks, pool.max_tokens, pool.work, pool.stages)
    batches = dict.fromkeys(batch for own in plan.microbatches for batch in own)
    padding = {batch: plan.padded(batch, pool.step) - plan.padded(batch, 1) for batch in batches}

    @cache
    def seconds(batch: PlannedBatch) -> float:
        return pool.work.shared([*(lengths[i] for i in batch.sequences), padding[batch]], batch.ranks)

    times = [[seconds(batch) for batch in own] for own in plan.microbatches]
    fills = [(pool.stages - 1) * max(own, default=0.0) for own in times]
    makespan = max(end + fill for end, fill in zip(_ends(plan, seconds), fills, strict=True))
    if pool.stages > 1:
        slowest = sorted(range(pool.ranks), key=lambda rank: sum(times[rank]) + fills[rank])[-SIMULATED:]
        # the plan counts the waits of rings, the simulation the order of 1F1B
        makespan = max(makespan, *(pool.pipeline(times[rank], plan.rows(rank, pool.step)) for rank in slowest))
    rings = [(lengths[i], ring.ranks) for ring in plan.rings for i in ring.sequences]
    counts = [len(own) for own in times]
    return LengthStep(makespan, rings, (min(counts), max(counts)), sum(padding.values())), plan


def _ends(plan: HybridPlan, seconds: Callable[[PlannedBatch], float]) -> list[float]:
    """Return when every rank is done with its micro-batches: a ring starts when all of its ranks are ready."""
    done = [0.0] * len(plan.microbatches)
    for row in zip_longest(*plan.microbatches):
        for batch in {batch for batch in row if batch is not None}:
            members = slice(batch.first, batch.first + batch.ranks)
            done[members] = [max(done[members]) + seconds(batch)] * batch.ranks
    return done


def static_step(lengths: Sequence[int], pool: Pool, cp: int, *, balanced: bool = False) -> LengthStep:
    """Time a step on a mesh of groups of `cp` ranks, which share every micro-batch; packs are dealt to the groups in
    turn, as a loader deals samples, or `balanced` by time, from the longest.
    """
    ordered = sorted(enumerate(lengths), key=lambda sequence: -sequence[1]) if balanced else [*enumerate(lengths)]
    packs = [[lengths[i] for i in pack] for pack in pack_sequences(ordered, cp * pool.max_tokens)]
    timed = [(pool.work.shared(pack, cp), sum(pack) // cp) for pack in packs]
    groups = max(1, pool.ranks // cp)
    if balanced:
        held, _ = deal(((pack[0], pack) for pack in sorted(timed, reverse=True)), [0.0] * groups)
    else:
        held = [timed[group::groups] for group in range(groups)]
    counts = [len(own) for own in held]
    slowest = sorted(held, key=lambda own: -sum(seconds for seconds, _ in own))[:SIMULATED]
    makespan = max(pool.pipeline([s for s, _ in own], [n for _, n in own]) for own in slowest)
    return LengthStep(makespan, [(sum(lengths), cp)], (min(counts), max(counts)))


def chunked_step(lengths: Sequence[int], pool: Pool, chunk_tokens: int, keep: int) -> LengthStep:
    """Time a step in chunks, without context parallelism: a rank trains on all chunks of a sequence."""

    def seconds(chunks: Sequence[SequenceChunk]) -> float:
        return sum(pool.work.chunk(start, stop) for chunk in chunks for _, start, stop in chunk)

    def makespan(entries: Sequence[Sequence[SequenceChunk]]) -> float:
        chunks = [chunk for entry in entries for chunk in entry]
        tokens = [sum(stop - start for _, start, stop in chunk) for chunk in chunks]
        return pool.pipeline([seconds([chunk]) for chunk in chunks], tokens, [len(entry) for entry in entries], keep)

    entries = cut_chunks(lengths, chunk_tokens)
    again = (pool.forward * seconds(entry[: max(0, len(entry) - keep)]) for entry in entries)
    timed = ((seconds(entry) + dropped, entry) for entry, dropped in zip(entries, again, strict=True))
    held, ready = deal(timed, [0.0] * pool.ranks)
    slowest = sorted(range(pool.ranks), key=lambda rank: (ready[rank], rank), reverse=True)[:SIMULATED]
    counts = [sum(map(len, own)) for own in held]
    return LengthStep(max(makespan(held[rank]) for rank in slowest), (), (min(counts), max(counts)))
