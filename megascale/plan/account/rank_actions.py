"""Walks through the actions of a pipeline rank: which there are (`rank_order`), the peak of their memory (`peak_of`),
and the receives that are posted (`posted_receives`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megascale.catalog.schedules import SCHEDULES, group_sizes
from megascale.config.parallel import ParallelConfig
from megascale.layout.parts.microbatch_sizes import UnitBytes
from megascale.layout.stages import Placement, placement_of
from megascale.schedule.ir import SERVED, Action, Kind, RankSchedule, each_action, parts
from megascale.schedule.lower import CACHED_ORDERS, compute_order, lower, order_of

GROUPS = 4  # groups of micro-batches until the memory of a periodic schedule repeats
FORWARDS = (Kind.F, Kind.R, Kind.VS)


def rank_order(parallel: ParallelConfig, m: int, chunks: int, keep: int, stage: int) -> RankSchedule:
    """List a rank's actions, of as many of m micro-batches as its memory depends on. `chunks`, `keep`: of a sample, and
    those that keep their activations.
    """
    p = parallel
    assert p.schedule is not None, "a resolved configuration names its schedule"
    facts = SCHEDULES[p.schedule].facts
    if chunks > 1:
        m = chunks * min(m // chunks, 2 + p.pp // chunks)  # as many samples as the pipeline holds
    elif facts["periodic"] and not facts["unbounded_in_flight"] and not p.skip_ratio:
        m = representative_microbatches(p.pp, m)
    if chunks > 1 or p.vocab_pp or p.skip_ratio:
        placement = placement_of(p.schedule, p.pp, p.vpp, p.vocab_pp, p.skip_ratio)
        return compute_order(p.schedule, placement, m, parts=chunks, keep=keep)[stage]
    return order_of(p.schedule, p.pp, p.vpp, m, stage)


def representative_microbatches(p: int, m: int) -> int:
    """Count the micro-batches with the same peak memory as m micro-batches, in groups, on p stages."""
    return sum(min(count, GROUPS) * size for size, count in Counter(group_sizes(p, m)).items())


class ChunkBytes(NamedTuple):
    """Bytes of a model chunk: as a `unit`; transient in a backward that `follows` another chunk's, with the shards of
    its gradients; of gradients still in reduction after the backward (`reducing`); of those that the backward writes
    `unsharded`, in W if it is split; of the heads' buckets, which the losses in the forward write, each with the
    chunk that owns it (`fused`). `by_unit`: if gradients are unsharded for two units at a time, those transient in a W,
    without gradients in reduction at its start, and beside them. `shards`: those of a W's gradients, as in `follows`.
    """

    unit: UnitBytes
    follows: int
    reducing: int = 0
    unsharded: int = 0
    fused: tuple[tuple[int, int], ...] = ()
    by_unit: tuple[int, int] | None = None
    shards: int = 0


def peak_of(order: RankSchedule, chunks: Sequence[ChunkBytes], received: int) -> tuple[int, int]:
    """Walk through a rank's actions: saved and transient bytes at the peak of their sum. Gradients in reduction:
    `newest`, from the chunk `before`, and `older`, freed before further gradients. `losses`: unsharded gradients of
    heads, by owner and chunk, from the loss to the backward of the owner. `leaving`: tensors that leave the device
    (`with_copies`), of the last forward with any, the `mover`, until the next one or its own backward. `received`:
    input of a forward that is recomputed.
    """
    dropped = {action[1:] for action in each_action(order) if action.kind is Kind.R}
    last = chunks[-1].unit
    saved, peak = last.saved, last.saved + last.casting  # in the first forward
    alive = newest = older = 0
    losses = dict[tuple[int, int], int]()
    before, leaving, mover = -1, 0, (-1, -1)
    walked = ((entry, action) for entry in order for action in reversed(parts(entry)))  # of a pair B, then F
    for entry, (kind, chunk, microbatch) in walked:
        unit, reducing = chunks[chunk].unit, chunks[chunk].reducing
        moved = unit.moved if kind in FORWARDS else 0
        if moved or (chunk, microbatch) == mover:  # which counts what leaves itself
            leaving, mover = 0, (chunk, microbatch)
        if kind in FORWARDS:
            again = (chunk, microbatch) in dropped
            alive += (received if kind is Kind.F else unit.saved - received) if again else unit.saved
        ends = kind in (Kind.B, Kind.W)
        losses = {key: held for key, held in losses.items() if not (ends and key[0] == chunk)}
        for owner, held in chunks[chunk].fused if kind is not Kind.I else ():
            if not (ends and owner == chunk):
                # a pair's loss begins before the reductions of its B
                older = older if (owner, chunk) in losses or len(parts(entry)) > 1 else 0
                losses[owner, chunk] = held
        again = newest > 0 and (chunk == before or chunks[chunk].by_unit is not None)
        beside = _transient(kind, chunks[chunk], older, again=again) + leaving
        if alive + beside + newest + sum(losses.values()) > peak:
            saved, peak = alive, alive + beside + newest + sum(losses.values())
        if kind is Kind.I:
            alive += unit.left - unit.saved
        elif kind in (Kind.B, Kind.W):
            older, newest = 0 if chunk == before else newest, reducing
            alive, before = alive - (unit.saved if kind is Kind.B else unit.left), chunk
        elif kind is Kind.VT:
            alive -= unit.saved
        leaving = moved or leaving
    return saved, peak - saved


def _transient(kind: Kind, chunk: ChunkBytes, older: int, *, again: bool) -> int:
    """Bytes beside what is saved. `again`: of the chunk whose gradients are in reduction, which finish bucket by bucket
    before new ones, or with gradients by unit of any chunk.
    """
    if kind is Kind.W and chunk.by_unit is not None:
        return chunk.by_unit[again]
    if kind is Kind.W:
        return chunk.unsharded + chunk.unit.wgrad + (0 if again else chunk.shards)
    if kind in (Kind.B, Kind.VT):
        return chunk.unit.backward if again else chunk.follows
    return older + (chunk.unit.backward - chunk.unsharded if kind is Kind.I else chunk.unit.forward)


def posted_receives(schedule: str, p: int, v: int, m: int, stage: int) -> int:
    """Bound the receives that a rank has posted for later actions (`schedule.lower`): two, or three of pairs, and where
    the stages of the next chunk begin or end also those of micro-batches that wait for the rest of a group larger than
    p, and with split backwards, which return sooner, up to p.
    """
    facts = SCHEDULES[schedule].facts
    last, waiting = stage == p - 1, group_sizes(p, m)[0] - p
    paired = 1 if facts["pairs"] else 0
    if v == 1:
        return min((1 if last else 2) + paired, m)
    posted = 4 if last else 2 + paired
    if last or stage == 0:
        posted = max(posted, p if facts["split"] else 0) + max(0, waiting)
    return min(posted, m * v)


@lru_cache(CACHED_ORDERS)
def posted_on_paths(placement: Placement, m: int) -> list[int]:
    """Count by rank the most receives that are posted for later actions in a partial pipeline."""
    counts = list[int]()
    for order in lower(compute_order("1f1b", placement, m), placement):
        posted, most = set[Action](), 0
        for action in each_action(order):
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                posted.add(action._replace(kind=SERVED[action.kind]))
            elif action.kind in (Kind.F, Kind.B):
                posted.discard(action)
                most = max(most, len(posted))
        counts.append(most)
    return counts
