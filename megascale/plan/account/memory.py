"""Memory of a rank: exact state (`state_bytes`), saved activations by a walk through the schedule, and a bound on
transient bytes (`account.activations`, docs/memory.md). Per stage: `rank_memory`, `memory_by_stage`, `fullest_rank`.

For N parameters of c bytes in the compute and a in the accumulation dtype, d data-parallel ranks and ZeRO stage z
(Rajbhandari et al. 2020): parameters c N, plus 2 bytes per FP8 weight; gradients a N, for z = 2 a N / d; optimizer
(k + 1) a N, for z >= 1 divided by d, with k state tensors and, if the two dtypes differ, master weights. State of whole
matrices is on their owners (`account.optimizer_state`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.schedules import SCHEDULES
from megascale.config.run import RunConfig
from megascale.config.train import TrainConfig
from megascale.layout.blocks import distinct_blocks, weight_numel
from megascale.layout.buckets import SHARDED
from megascale.layout.chunks import bucket_sizes, fp8_layers, stages_of
from megascale.layout.parts.microbatch_sizes import UnitBytes
from megascale.layout.recompute_policy import recompute_policy
from megascale.plan.account import activations
from megascale.plan.account.optimizer_state import optimizer_state_bytes, update_bytes
from megascale.plan.account.sizes import message_bytes, micro_batch_sizes, replicas
from megascale.schedule.interleaved import microbatch_groups
from megascale.schedule.ir import Kind, RankSchedule
from megascale.schedule.state_aware import state_aware_1f1b

GROUPS = 3  # groups of micro-batches until the memory of a periodic schedule repeats
MAX_ACTIONS = 2_000_000  # most actions of a pipeline with a walk through every stage
CACHED_ORDERS = 64  # layouts of a search often share the order of actions
TOKEN_IDS = 16  # bytes of a token's id and label


@dataclass(frozen=True)
class WeightStorage:
    """Weight storage of a trainer. `shards_weights`: sharded over dp whatever `parallel.zero` is, and all-gathered unit
    by unit (ZeRO-3, FSDP). `fp8_weights`: FP8 copies beside bf16 weights, as in this trainer, or instead of them.
    """

    shards_weights: bool = False
    fp8_weights: Literal["beside", "instead"] = "beside"


THIS_TRAINER = WeightStorage()


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank that persist between steps."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class RankMemory(StateBytes):
    """Bytes on one rank at the peak. `activations`: saved for backward; `transient`: a bound on temporary tensors, with
    unsharded gradients, all-gathered weights, receive buffers and tokens; or what is more, of an update of whole
    matrices.
    """

    activations: int
    transient: int


def state_bytes(config: RunConfig, stage: int, storage: WeightStorage = THIS_TRAINER) -> StateBytes:
    """Count the state of a rank of a pipeline stage, for a resolved configuration."""
    facts, ranks = PRECISIONS[config.train.precision].facts, replicas(config)
    compute, accumulate = facts["compute_bytes"], facts["accumulate_bytes"]
    zero = 3 if storage.shards_weights else config.parallel.zero
    sharded = SHARDED[zero]
    layout, fp8 = stages_of(config), fp8_layers(config)
    blocks, numbers = distinct_blocks(config.model)
    layers = chain(*(layout.layers(layout.index(stage, chunk)) for chunk in range(layout.vpp)))
    cast = sum(weight_numel(blocks[numbers[layer]]) for layer in layers if layer in fp8) // config.parallel.tp
    cast_bytes = facts["fp8_weight_bytes"] - (compute if storage.fp8_weights == "instead" else 0)
    elements = sum(bucket.numel for chunk in bucket_sizes(config, stage) for bucket in chunk)
    shard = elements // ranks if "state" in sharded else elements
    master = compute if config.optimizer.master == "compensated" else accumulate
    masters = shard * ((master if facts["master_weights"] else 0) + accumulate * averages(config.train))
    return StateBytes(
        parameters=(compute * elements + cast_bytes * cast) // (ranks if "weight" in sharded else 1),
        gradients=accumulate * (elements // ranks if "gradient" in sharded else elements),
        optimizer=optimizer_state_bytes(config, stage, zero) + masters,
    )


def averages(settings: TrainConfig) -> int:
    """Count the tensors of averaged weights, each of the size of master weights."""
    return {"none": 0, "ema": 1, "lawa": settings.average_count}[settings.average]


def rank_memory(config: RunConfig, stage: int, storage: WeightStorage = THIS_TRAINER) -> RankMemory:
    """Account for a rank of a pipeline stage, for a resolved configuration."""
    return _Job(config, storage).rank(stage)


def memory_by_stage(config: RunConfig, storage: WeightStorage = THIS_TRAINER) -> list[RankMemory]:
    """Account for a rank of every pipeline stage. In a pipeline of over `MAX_ACTIONS` the inner stages of a run of
    stages with equal chunks are interpolated, within 4% of a walk.
    """
    job, p = _Job(config, storage), config.parallel
    starts, last = job.starts(), p.pp - 1
    ends = {*starts, *(start - 1 for start in starts[1:]), last}
    actions = 2 * p.pp * p.vpp * representative_microbatches(p.pp, config.num_microbatches)
    ranks = {stage: job.rank(stage) for stage in (sorted(ends) if actions > MAX_ACTIONS else range(p.pp))}
    return [_interpolated(ranks, stage) for stage in range(p.pp)]


def _interpolated(ranks: dict[int, RankMemory], stage: int) -> RankMemory:
    low, high = max(known for known in ranks if known <= stage), min(known for known in ranks if known >= stage)
    share = (stage - low) / max(1, high - low)
    pairs = zip(vars(ranks[low]).values(), vars(ranks[high]).values(), strict=True)
    return RankMemory(*(round(first + share * (second - first)) for first, second in pairs))


def fullest_rank(config: RunConfig, storage: WeightStorage = THIS_TRAINER, limit: float = math.inf) -> RankMemory:
    """Find the rank with the highest peak, or the first rank over `limit` bytes. In a run of stages with equal chunks
    the first stage has most micro-batches in flight. Both ends of the pipeline are tried first.
    """
    job, last = _Job(config, storage), config.parallel.pp - 1
    fullest = job.rank(0)
    for stage in dict.fromkeys([last, *job.starts()]) if last else ():
        if fullest.total > limit:
            break
        fullest = max(fullest, job.rank(stage), key=lambda rank: rank.total) if stage else fullest
    return fullest


class _Chunk(NamedTuple):
    """Bytes of a model chunk: as a `unit`; transient in a backward that `follows` another chunk's, with the shards of
    its gradients; of gradients still in reduction after the backward (`reducing`).
    """

    unit: UnitBytes
    follows: int
    reducing: int = 0


class _Job:
    """Memory accounting of a job, with the bytes of equal blocks cached."""

    def __init__(self, config: RunConfig, storage: WeightStorage) -> None:
        self._config, self._storage = config, storage
        self._zero2 = "gradient" in SHARDED[config.parallel.zero] and not storage.shards_weights
        self._layout, self._sizes = stages_of(config), micro_batch_sizes(config)
        self._fp8 = fp8_layers(config)
        blocks, self._numbers = distinct_blocks(config.model)
        self._block = cache(
            lambda number, fp8, recompute: activations.block_bytes(self._sizes, blocks[number], fp8, recompute)
        )

    def units(self, stage: int) -> list[list[UnitBytes]]:
        """List the units of a rank's chunks. A tied head on the embedding's rank has no weight."""
        tied = self._config.model.tie_embeddings and self._layout.pp == 1
        head, chunks = activations.head_bytes(self._sizes), list[list[UnitBytes]]()
        head = head._replace(elements=0) if tied else head
        for chunk in range(self._layout.vpp):
            index, recompute = self._layout.index(stage, chunk), recompute_policy(self._config.train, chunk)
            layers = self._layout.layers(index)
            blocks = [self._block(self._numbers[layer], layer in self._fp8, recompute) for layer in layers]
            first, last = index == 0, index == self._layout.count - 1
            begin = [] if chunk or not self._sizes.documents else [activations.angle_bytes(self._sizes)]
            begin += [activations.embedding_bytes(self._sizes)] if first else []
            chunks.append(begin + blocks + ([head] if last else []))
        return chunks

    def starts(self) -> list[int]:
        """List the first stages of runs of stages with equal chunks."""
        units = [*map(self.units, range(self._layout.pp))]
        return [stage for stage in range(len(units)) if stage == 0 or units[stage] != units[stage - 1]]

    def rank(self, stage: int) -> RankMemory:
        """Account for a rank of a stage, with posted receives, tokens, and two all-gathered units in ZeRO-3."""
        config, p = self._config, self._config.parallel
        m, units = config.num_microbatches, self.units(stage)
        first, last = (self._layout.placement.places[end][0] for end in (0, -1))
        head = bucket_sizes(config, stage)[-1][-1].numel if self._zero2 and stage == last else 0
        order = rank_order(config, stage)
        received = self._sizes.stream if stage else 0  # the input of a dropped chunk
        saved, transient = _peak(order, [*map(self._chunk, units)], self._sizes.wide * head, received)
        if config.num_chunks > 1:
            layers = len(self._layout.layers(self._layout.index(stage, 0)))
            tokens = config.batch.micro * config.model.seq_length
            saved += activations.key_store_bytes(self._sizes, layers, tokens)
        if p.pp > 1:
            transient += posted_receives(p.pp, p.vpp, m, stage) * message_bytes(config)
        if stage in (first, last):
            transient += TOKEN_IDS * self._sizes.tokens * m
        if self._storage.shards_weights:
            largest = sorted((unit.elements for unit in chain(*units)), reverse=True)[:2]
            transient += self._sizes.compute * sum(largest) + self._sizes.wide * largest[0]
        state = state_bytes(config, stage, self._storage)
        if not self._storage.shards_weights:
            transient = max(transient, update_bytes(config, stage) - saved)
        return RankMemory(state.parameters, state.gradients, state.optimizer, saved, transient)

    def _chunk(self, units: Sequence[UnitBytes]) -> _Chunk:
        """Account for a chunk. In ZeRO-2 a backward writes unsharded gradients, then reduced to shards: unit by unit,
        or with overlap in the background until the next backward.
        """
        chunk, overlap = chunk_bytes(units), self._config.overlap.dp
        if not self._zero2:
            return _Chunk(chunk, chunk.backward)
        size, ranks = self._sizes.wide, replicas(self._config)
        share = size / ranks if ranks > 1 or not overlap else 0.0  # with one rank the shard is the gradient itself
        unsharded, follows = size * chunk.elements, chunk_bytes(units, share, overlap).backward
        reducing = unsharded + int(share * chunk.elements) if overlap else 0
        return _Chunk(chunk._replace(backward=chunk.backward + unsharded), follows + unsharded, reducing)


def chunk_bytes(units: Sequence[UnitBytes], share: float = 0.0, stay: bool = False) -> UnitBytes:
    """Account for a chain of units: a unit's backward begins after later units freed their saved tensors, and ends
    with gradient shards of `share` bytes an element, freed at once or at the chain's end (`stay`).
    """
    saved = forward = backward = casting = 0
    for unit in reversed(units):
        shard = int(share * unit.elements)
        forward, casting = max(forward, unit.forward - saved), max(casting, unit.casting - saved)
        backward = max(backward, unit.backward - saved, shard - unit.saved - saved)
        saved += unit.saved - (shard if stay else 0)
    return UnitBytes(saved, forward, backward, elements=sum(unit.elements for unit in units), casting=casting)


def _peak(order: RankSchedule, chunks: list[_Chunk], head: int, received: int) -> tuple[int, int]:
    """Walk through a rank's actions: saved and transient bytes at the peak of their sum. Gradients in reduction:
    `newest`, from the chunk `before`, and `older`, freed in the next backward. `head`: unsharded gradient of the head,
    from the loss to the last chunk's backward. `received`: input of a forward that is recomputed.
    """
    dropped = {action[1:] for action in order if action.kind is Kind.R}
    last = chunks[-1].unit
    saved, peak = last.saved, last.saved + last.casting  # in the first forward
    alive = newest = older = loss = 0
    before = -1
    for kind, chunk, microbatch in order:
        unit, follows, reducing = chunks[chunk]
        if kind in (Kind.F, Kind.R):
            again = (chunk, microbatch) in dropped
            alive += (received if kind is Kind.F else unit.saved - received) if again else unit.saved
        if chunk == len(chunks) - 1:
            loss = head if kind in (Kind.F, Kind.R) else 0
        beside = unit.forward + older
        if kind not in (Kind.F, Kind.R):  # reductions of a chunk finish bucket by bucket, before new gradients
            beside = unit.backward if newest and chunk == before else follows
        if alive + beside + newest + loss > peak:
            saved, peak = alive, alive + beside + newest + loss
        if kind in (Kind.B, Kind.W):  # W needs all that the stage has saved
            older, newest = 0 if chunk == before else newest, reducing
            alive, before = alive - unit.saved, chunk
    return saved, peak - saved


def posted_receives(p: int, v: int, m: int, stage: int) -> int:
    """Bound the receives that a rank has posted for later actions (`schedule.lower`): two, and where the stages of the
    next chunk begin or end also those of micro-batches that wait for the rest of a group larger than p.
    """
    last, waiting = stage == p - 1, max(groups.size for groups in microbatch_groups(p, m) if groups.num_groups) - p
    if v == 1:
        return min(1 if last else 2, m)
    return min((4 if last else 2) + (max(0, waiting) if last or stage == 0 else 0), m * v)


def rank_order(config: RunConfig, stage: int) -> RankSchedule:
    """List a rank's actions, of as many micro-batches as its memory depends on."""
    p = config.parallel
    assert p.schedule is not None, "a resolved configuration names its schedule"
    if config.num_chunks > 1:  # of as many samples as the pipeline holds
        samples = config.num_microbatches // config.num_chunks
        enough = min(samples, 2 + p.pp // config.num_chunks)
        return state_aware_1f1b(p.pp, [config.num_chunks] * enough, config.data.keep_chunks, stage)
    return _order(p.schedule, p.pp, p.vpp, config.num_microbatches, stage)


@lru_cache(CACHED_ORDERS)
def _order(schedule: str, p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List a rank's actions, of a periodic schedule only `representative` micro-batches."""
    card = SCHEDULES[schedule]
    repeats = card.facts.get("periodic", False) and not card.facts["unbounded_in_flight"]
    return card.load()(p, v, representative_microbatches(p, m) if repeats else m, rank)


def representative_microbatches(p: int, m: int) -> int:
    """Count the micro-batches with the same peak memory as m micro-batches, in groups, on p stages."""
    return sum(min(groups.num_groups, GROUPS) * groups.size for groups in microbatch_groups(p, m))
