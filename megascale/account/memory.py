"""Bytes that a rank holds in a step: its state, exact; saved activations, by playing its schedule; a bound on transient
bytes (`account.activations`, docs/memory.md).

For N parameters on a rank, c bytes in the compute dtype and a in that of accumulation, over d ranks of data parallelism
with ZeRO stage z (Rajbhandari et al. 2020): parameters c N, with FP8 two bytes more for each that is cast; gradients
a N, for z = 2 a N / d; optimizer (k + master) a N, for z >= 1 divided by d, with k state tensors and a master copy
where the two dtypes differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from megascale.account.activations import Sizes, UnitBytes, block_bytes, embedding_bytes, head_bytes
from megascale.account.traffic import message_bytes, replicas
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.schedules import SCHEDULES
from megascale.config.run import RunConfig
from megascale.layout.blocks import kinds, weights
from megascale.layout.chunks import eight_bit_layers, packed, stages_of
from megascale.layout.recompute import recompute_of
from megascale.schedule.interleaved import groups_of
from megascale.schedule.ir import Kind, Order
from megascale.schedule.lower import AHEAD

GROUPS = 3
"""Groups of micro-batches after which a schedule that goes in groups repeats itself."""

PLAYED = 2_000_000
"""Actions of all ranks up to which every rank is played."""

RECENT = 64
"""Cached orders of actions: layouts of a search often share them."""

TOKEN_IDS = 16
"""Bytes of a token's id and label."""


@dataclass(frozen=True)
class Holding:
    """How a trainer holds weights. `shards_weights`: over data parallelism (ZeRO-3, FSDP) whatever `parallel.zero` is,
    all-gathered unit by unit. `fp8_weights`: FP8 copies beside weights in bf16, as in this trainer, or instead of them.
    """

    shards_weights: bool = False
    fp8_weights: Literal["beside", "instead"] = "beside"


THIS_TRAINER = Holding()


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank that last from step to step."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class RankMemory(StateBytes):
    """Bytes on one rank when they are most. `activations`: saved for backwards; `transient`: a bound of what operations
    need while they run, with whole gradients, gathered weights, messages and tokens.
    """

    activations: int
    transient: int


def state_bytes(config: RunConfig, stage: int, holding: Holding = THIS_TRAINER) -> StateBytes:
    """Count the state of a rank of pipeline stage `stage`, of a resolved configuration."""
    facts, ranks = PRECISIONS[config.train.precision].facts, replicas(config)
    compute, accumulate = facts["compute_bytes"], facts["accumulate_bytes"]
    zero = 3 if holding.shards_weights else config.parallel.zero
    tensors = OPTIMIZERS[config.optimizer.name].facts["state"] + (1 if facts["master"] else 0)
    layout, fp8 = stages_of(config), eight_bit_layers(config)
    blocks, numbers = kinds(config.model)
    layers = chain(*(layout.layers(layout.index(stage, chunk)) for chunk in range(layout.vpp)))
    cast = sum(weights(blocks[numbers[layer]]) for layer in layers if layer in fp8) // config.parallel.tp
    cast_bytes = facts["cast_bytes"] - (compute if holding.fp8_weights == "instead" else 0)
    elements = sum(bucket.numbers for chunk in packed(config, stage) for bucket in chunk)
    return StateBytes(
        parameters=(compute * elements + cast_bytes * cast) // (ranks if zero == 3 else 1),
        gradients=accumulate * (elements // ranks if zero >= 2 else elements),
        optimizer=tensors * accumulate * (elements // ranks if zero else elements),
    )


def rank_memory(config: RunConfig, stage: int, holding: Holding = THIS_TRAINER) -> RankMemory:
    """Account for a rank of pipeline stage `stage`, of a resolved configuration."""
    return _Job(config, holding).rank(stage)


def memory_by_stage(config: RunConfig, holding: Holding = THIS_TRAINER) -> list[RankMemory]:
    """Account for a rank of each pipeline stage. In a pipeline of over `PLAYED` actions only the first and the last of
    stages in a row with equal chunks are played; stages between them are interpolated, within 4% of a play.
    """
    job, p = _Job(config, holding), config.parallel
    starts, last = job.starts(), p.pp - 1
    ends = {*starts, *(start - 1 for start in starts[1:]), last}
    actions = 2 * p.pp * p.vpp * representative(p.pp, config.micro_batches)
    played = {stage: job.rank(stage) for stage in (sorted(ends) if actions > PLAYED else range(p.pp))}
    return [_interpolated(played, stage) for stage in range(p.pp)]


def _interpolated(played: dict[int, RankMemory], stage: int) -> RankMemory:
    low, high = max(known for known in played if known <= stage), min(known for known in played if known >= stage)
    share = (stage - low) / max(1, high - low)
    pairs = zip(vars(played[low]).values(), vars(played[high]).values(), strict=True)
    return RankMemory(*(round(first + share * (second - first)) for first, second in pairs))


def fullest_rank(config: RunConfig, holding: Holding = THIS_TRAINER, room: float = math.inf) -> RankMemory:
    """Find the rank that holds most, or one that holds more than `room` bytes. Of stages in a row with equal chunks the
    first has most micro-batches in flight, so it holds most. The ends of the pipeline are tried first.
    """
    job, last = _Job(config, holding), config.parallel.pp - 1
    best = job.rank(0)
    for stage in dict.fromkeys([last, *job.starts()]) if last else ():
        if best.total > room:
            break
        best = max(best, job.rank(stage), key=lambda rank: rank.total) if stage else best
    return best


class _Chunk(NamedTuple):
    """Bytes of a chunk: as a `unit`; in a backward that `follows` another chunk's; of its gradients then `reducing`."""

    unit: UnitBytes
    follows: int
    reducing: int = 0


class _Job:
    """The ranks of a configuration. Blocks that are alike are accounted for once."""

    def __init__(self, config: RunConfig, holding: Holding) -> None:
        self._config, self._holding = config, holding
        self._zero2 = config.parallel.zero == 2 and not holding.shards_weights
        self._layout, self._sizes = stages_of(config), Sizes(config)
        self._fp8 = eight_bit_layers(config)
        blocks, self._numbers = kinds(config.model)
        self._block = cache(lambda number, fp8, recompute: block_bytes(self._sizes, blocks[number], fp8, recompute))

    def units(self, stage: int) -> list[list[UnitBytes]]:
        """List the units of a rank's chunks. A head of the same rank as its tied embedding has no weight of its own."""
        tied = self._config.model.tie_embeddings and self._layout.pp == 1
        head, chunks = head_bytes(self._sizes), list[list[UnitBytes]]()
        head = head._replace(elements=0) if tied else head
        for chunk in range(self._layout.vpp):
            index, recompute = self._layout.index(stage, chunk), recompute_of(self._config.train, chunk)
            layers = self._layout.layers(index)
            blocks = [self._block(self._numbers[layer], layer in self._fp8, recompute) for layer in layers]
            first, last = index == 0, index == self._layout.count - 1
            chunks.append(([embedding_bytes(self._sizes)] if first else []) + blocks + ([head] if last else []))
        return chunks

    def starts(self) -> list[int]:
        """List the stages whose chunks differ from those of the stage before."""
        units = [*map(self.units, range(self._layout.pp))]
        return [stage for stage, own in enumerate(units) if stage == 0 or own != units[stage - 1]]

    def rank(self, stage: int) -> RankMemory:
        """Account for a rank of a stage. Beside all actions are receives that are posted, token ids and labels, and
        of sharded weights two gathered units and the whole gradient of one.
        """
        config, p = self._config, self._config.parallel
        m, units = config.micro_batches, self.units(stage)
        assert p.schedule is not None, "a resolved configuration names its schedule"
        head = packed(config, stage)[-1][-1].numbers if self._zero2 and stage == p.pp - 1 else 0
        order, chunks = _order(p.schedule, p.pp, p.vpp, m, stage), [*map(self._chunk, units)]
        activations, transient = _peak(order, chunks, self._sizes.wide * head)
        if p.pp > 1 and config.overlap.pp:
            transient += min(AHEAD if stage < p.pp - 1 else 1, m) * message_bytes(config)
        if stage in (0, p.pp - 1):
            transient += TOKEN_IDS * self._sizes.tokens * m
        if self._holding.shards_weights:
            largest = sorted((unit.elements for unit in chain(*units)), reverse=True)[:2]
            transient += self._sizes.compute * sum(largest) + self._sizes.wide * largest[0]
        state = state_bytes(config, stage, self._holding)
        return RankMemory(state.parameters, state.gradients, state.optimizer, activations, transient)

    def _chunk(self, units: Sequence[UnitBytes]) -> _Chunk:
        """Account for a chunk. With ZeRO-2 its whole gradients are there in its backward, and a reduction forms a shard
        of each: one unit after another, or with overlap in the background until the next backward.
        """
        chunk, overlap = chunk_bytes(units), self._config.overlap.dp
        if not self._zero2:
            return _Chunk(chunk, chunk.backward)
        size, ranks = self._sizes.wide, replicas(self._config)
        share = size / ranks if ranks > 1 or not overlap else 0.0  # a lone rank's replaces the whole at once
        whole, follows = size * chunk.elements, chunk_bytes(units, share, overlap).backward
        reducing = whole + int(share * chunk.elements) if overlap else 0
        return _Chunk(chunk._replace(backward=chunk.backward + whole), follows + whole, reducing)


def chunk_bytes(units: Sequence[UnitBytes], share: float = 0.0, stay: bool = False) -> UnitBytes:
    """Account for units one after another: a backward begins when later units have released what they saved. After it
    come shards of its gradients, `share` bytes an element, which may `stay`.
    """
    saved = forward = backward = casting = 0
    for unit in reversed(units):
        shard = int(share * unit.elements)
        forward, casting = max(forward, unit.forward - saved), max(casting, unit.casting - saved)
        backward = max(backward, unit.backward - saved, shard - unit.saved - saved)
        saved += unit.saved - (shard if stay else 0)
    return UnitBytes(saved, forward, backward, elements=sum(unit.elements for unit in units), casting=casting)


def _peak(order: Order, chunks: list[_Chunk], head: int) -> tuple[int, int]:
    """Play a rank's actions: saved and transient bytes when their sum is most. Gradients in reduction: the `newest` of
    the chunk `before`, the `older` of another until the next backward. `head`: whole gradients from the loss, in the
    last chunk, to its backward.
    """
    last = chunks[-1].unit
    saved, most = last.saved, last.saved + last.casting  # in the first forward
    alive = newest = older = loss = 0
    before = -1
    for kind, chunk, _ in order:
        unit, follows, reducing = chunks[chunk]
        alive += unit.saved if kind is Kind.F else 0
        if chunk == len(chunks) - 1:
            loss = head if kind is Kind.F else 0
        beside = unit.forward + older
        if kind is Kind.B:  # gradients of its chunk that are in reduction end one by one
            beside = unit.backward if newest and chunk == before else follows
        if alive + beside + newest + loss > most:
            saved, most = alive, alive + beside + newest + loss
        if kind is Kind.B:
            older, newest = 0 if chunk == before else newest, reducing
            alive, before = alive - unit.saved, chunk
    return saved, most - saved


@lru_cache(RECENT)
def _order(schedule: str, p: int, v: int, m: int, rank: int) -> Order:
    """List a rank's actions for as many micro-batches as show all that is alive at once."""
    card = SCHEDULES[schedule]
    repeats = card.facts.get("repeats", False) and not card.facts["piles"]
    return card.load()(p, v, representative(p, m) if repeats else m, rank)


def representative(p: int, m: int) -> int:
    """Count the micro-batches that show all that is alive at once in m, which go in groups through p stages."""
    return sum(min(groups.number, GROUPS) * groups.size for groups in groups_of(p, m))
