"""Bytes that a rank holds in a step: its state, exact; saved activations, by playing its schedule; a bound on transient
bytes.

For N parameters on a rank, c bytes in the compute dtype and a in that of accumulation, over d ranks of data parallelism
with ZeRO stage z (Rajbhandari et al. 2020): parameters c N, with FP8 two bytes more for each that is cast; gradients
a N, for z = 2 a N / d; optimizer (k + master) a N, for z >= 1 divided by d, with k state tensors and a master copy
where the two dtypes differ. Transient are the most of a block's forward and backward, the loss, and with z = 2 whole
gradients of a chunk and of those that are being reduced (`account.activations`, docs/memory.md).
"""

from __future__ import annotations

import math
from collections import Counter
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
from megascale.layout.chunks import Packed, chunk_parameters, eight_bit_layers, packed, stages_of
from megascale.layout.chunks import unit as unit_of
from megascale.layout.recompute import recompute_of
from megascale.layout.topology import topology_of
from megascale.schedule.interleaved import groups_of
from megascale.schedule.ir import Kind, Order
from megascale.schedule.lower import AHEAD

GROUPS = 3
"""Groups of micro-batches after which a schedule that goes in groups repeats itself."""

RECENT = 64
"""Orders that are kept: layouts of a search often share them."""

TOKEN_IDS = 16
"""Bytes of a token's id and label."""


@dataclass(frozen=True)
class Holding:
    """How a trainer holds weights. `shards_weights`: sharded over data parallelism (ZeRO-3, FSDP), whatever
    `parallel.zero` is, and all-gathered unit by unit. `fp8_weights`: FP8 copies beside the weights in bf16, as this
    trainer has them, or instead of them.
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
    return _state(config, stage, holding, packed(config, stage))


def _state(config: RunConfig, stage: int, holding: Holding, buckets: list[list[Packed]]) -> StateBytes:
    facts, ranks = PRECISIONS[config.train.precision].facts, replicas(config)
    compute, accumulate = facts["compute_bytes"], facts["accumulate_bytes"]
    layout, fp8 = stages_of(config), eight_bit_layers(config)
    tensors = OPTIMIZERS[config.optimizer.name].facts["state"] + (1 if facts["master"] else 0)
    elements = sum(bucket.numbers for chunk in buckets for bucket in chunk)
    held = (layer for chunk in range(layout.vpp) for layer in layout.layers(layout.index(stage, chunk)))
    blocks, numbers = kinds(config.model)
    cast = sum(weights(blocks[numbers[layer]]) for layer in held if layer in fp8) // config.parallel.tp
    more = facts["cast_bytes"] - (compute if holding.fp8_weights == "instead" else 0)
    zero = 3 if holding.shards_weights else config.parallel.zero
    return StateBytes(
        parameters=(compute * elements + more * cast) // (ranks if zero == 3 else 1),
        gradients=accumulate * (elements // ranks if zero >= 2 else elements),
        optimizer=tensors * accumulate * (elements // ranks if zero else elements),
    )


def rank_memory(config: RunConfig, stage: int, holding: Holding = THIS_TRAINER) -> RankMemory:
    """Account for a rank of pipeline stage `stage`, of a resolved configuration."""
    return _Job(config, holding).rank(stage)


def memory_by_stage(config: RunConfig, holding: Holding = THIS_TRAINER) -> list[RankMemory]:
    """Account for a rank of each pipeline stage."""
    return [*map(_Job(config, holding).rank, range(config.parallel.pp))]


def fullest_rank(config: RunConfig, holding: Holding = THIS_TRAINER, room: float = math.inf) -> RankMemory:
    """Find the rank that holds most, or one that holds more than `room` bytes. Of ranks whose chunks are alike the
    first goes furthest ahead, so it holds most. The ends of the pipeline are tried first.
    """
    job, last = _Job(config, holding), config.parallel.pp - 1
    inner = {job.blocks(stage): stage for stage in range(last - 1, 0, -1)}
    best = job.rank(0)
    for stage in [last, *sorted(inner.values())] if last else []:
        if best.total > room:
            break
        best = max(best, job.rank(stage), key=lambda rank: rank.total)
    return best


class _Chunk(NamedTuple):
    """Bytes of a chunk. With zero = 2 whole `gradients` are there in its backward, and from the loss on those of the
    bucket with the `head`; `growing`: its backward where gradients of another chunk are being reduced, and none of its
    own are released; `reducing`: what it leaves of them.
    """

    unit: UnitBytes
    growing: int
    gradients: int = 0
    head: int = 0
    reducing: int = 0


class _Job:
    """The ranks of a configuration. Blocks that are alike are accounted for once."""

    def __init__(self, config: RunConfig, holding: Holding) -> None:
        self._config, self._holding = config, holding
        self._layout, self._sizes = stages_of(config), Sizes(config)
        fp8, (distinct, numbers) = eight_bit_layers(config), kinds(config.model)
        self._kinds = [(number, layer in fp8) for layer, number in enumerate(numbers)]
        self._bytes = cache(lambda kind, recompute: block_bytes(self._sizes, distinct[kind[0]], kind[1], recompute))

    def blocks(self, stage: int) -> tuple[tuple[tuple[int, bool], ...], ...]:
        """List the kinds of the blocks in each chunk of a rank."""
        chunks = (self._layout.layers(self._layout.index(stage, chunk)) for chunk in range(self._layout.vpp))
        return tuple(tuple(self._kinds[layers.start : layers.stop]) for layers in chunks)

    def rank(self, stage: int) -> RankMemory:
        """Account for a rank of a stage."""
        config, m = self._config, self._config.micro_batches
        p = config.parallel
        assert p.schedule is not None, "a resolved configuration names its schedule"
        buckets = packed(config, stage)
        chunks = [self._chunk(stage, *each) for each in enumerate(buckets)]
        activations, transient = _peak(_order(p.schedule, p.pp, p.vpp, m, stage), chunks)
        posted = min(AHEAD if stage < p.pp - 1 else 1, m)  # receives, beside an action
        transient += posted * message_bytes(config) if p.pp > 1 and config.overlap.pp else 0
        transient += TOKEN_IDS * self._sizes.tokens * m if stage in (0, p.pp - 1) else 0
        transient += _gathered(config, stage) if self._holding.shards_weights else 0
        rotary = config.model.seq_length * config.model.head_dim * self._sizes.wide  # the table, one for all layers
        transient += rotary if config.model.position == "rope" else 0
        state = _state(config, stage, self._holding, buckets)
        return RankMemory(state.parameters, state.gradients, state.optimizer, activations, transient)

    def _chunk(self, stage: int, chunk: int, buckets: list[Packed]) -> _Chunk:
        config, index = self._config, self._layout.index(stage, chunk)
        last, recompute = index == self._layout.count - 1, recompute_of(config.train, chunk)
        tied = config.model.tie_embeddings and config.parallel.pp == 1  # the head's gradient is the embedding's
        units = [embedding_bytes(self._sizes)] if index == 0 else []
        units += [self._bytes(self._kinds[layer], recompute) for layer in self._layout.layers(index)]
        if last:
            head = head_bytes(self._sizes)
            units.append(head._replace(elements=0) if tied else head)
        if self._holding.shards_weights or config.parallel.zero < 2:
            unit = chunk_bytes(units)
            return _Chunk(unit, unit.backward)
        size, ranks = PRECISIONS[config.train.precision].facts["accumulate_bytes"], replicas(config)
        sizes = [size * bucket.numbers for bucket in buckets]
        whole, overlap = sum(sizes), config.overlap.dp
        left, shards = (whole // ranks if ranks > 1 else 0) if overlap else -whole, whole // ranks
        unit = chunk_bytes(units, -whole, 0 if overlap else shards, self._sizes.stream)
        growing = chunk_bytes(units, left, shards, self._sizes.stream).backward
        return _Chunk(unit, growing, whole, sizes[0 if tied else -1] if last else 0, whole + left)


def chunk_bytes(units: list[UnitBytes], left: int = 0, shards: int = 0, grad: int = 0) -> UnitBytes:
    """Account for units one after another: a unit's backward begins when those of later ones have released what they
    saved. With zero = 2 the reductions of all gradients leave `left` bytes, and give `shards`; between two backwards
    there is one gradient of `grad` bytes beside.
    """
    saved = forward = backward = casting = done = 0
    elements = max(1, sum(unit.elements for unit in units))
    for unit in reversed(units):
        forward = max(forward, unit.forward - saved)
        backward = max(backward, unit.backward - saved + left * done // elements)
        casting, saved = max(casting, unit.casting - saved), saved + unit.saved
        backward = max(backward, grad - saved + (left * done + shards * unit.elements) // elements)
        done += unit.elements
    return UnitBytes(saved, forward, backward, elements, casting)


def _peak(order: Order, chunks: list[_Chunk]) -> tuple[int, int]:
    """Play a rank's actions: saved and transient bytes when their sum is most. Of whole gradients those of the chunk
    before (`newest`) are being reduced, and until a chunk makes room for its own those of the one before that.
    """
    saved, before = chunks[-1].unit.saved, -1
    most = saved + chunks[-1].unit.casting  # in the first forward
    alive = newest = older = head = 0
    for kind, chunk, _ in order:
        own = chunks[chunk]
        unit = own.unit
        if kind is Kind.F:
            older, head = (0, own.head) if own.head else (older, head)
            alive += unit.saved
            total = alive + unit.forward + newest + older + head
        else:
            head = 0 if own.head else head
            total = alive + own.gradients + (unit.backward if chunk == before else own.growing) + newest + head
        if total > most:
            saved, most = alive, total
        if kind is Kind.B:
            older, newest = 0 if chunk == before else newest, own.reducing
            before, alive = chunk, alive - unit.saved
    return saved, most - saved


@lru_cache(RECENT)
def _order(schedule: str, p: int, v: int, m: int, rank: int) -> Order:
    """List a rank's actions for as many micro-batches as show all that is alive at once."""
    card = SCHEDULES[schedule]
    repeats = card.facts.get("repeats", False) and not card.facts["piles"]
    order: Order = card.load()(p, v, representative(p, m) if repeats else m, rank)
    return order


def representative(p: int, m: int) -> int:
    """Count the micro-batches that show all that is alive at once in m, which go in groups through p stages."""
    return sum(min(groups.number, GROUPS) * groups.size for groups in groups_of(p, m))


def _gathered(config: RunConfig, stage: int) -> int:
    """Size what is whole where weights are sharded: the unit that computes, the next one, and the gradient of one."""
    facts, sizes = PRECISIONS[config.train.precision].facts, Counter[str]()
    for parameter in chain(*chunk_parameters(config, stage)):
        sizes[unit_of(parameter.name)] += parameter.local_numel(topology_of(config))
    largest = sorted(sizes.values(), reverse=True)[:2]
    size: int = facts["compute_bytes"] * sum(largest) + facts["accumulate_bytes"] * largest[0]
    return size
