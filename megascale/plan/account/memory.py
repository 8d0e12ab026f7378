"""Memory of a rank (`JobMemory`): its state (`account.state_bytes`), saved activations by a walk through the schedule,
and a bound on transient bytes (`account.activations`, docs/memory.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

from megascale.config.run import RunConfig
from megascale.config.teacher_file import ENTRY_BYTES
from megascale.config.train import TrainConfig
from megascale.layout.chunks import (
    BucketSize,
    bucket_sizes,
    count_heads,
    exits_of,
    fp8_layers,
    stages_of,
    token_ranks,
)
from megascale.layout.parts.microbatch_sizes import MicroBatchSizes, UnitBytes
from megascale.layout.recompute_policy import RecomputePolicy, joined_chunks, recompute_policy
from megascale.layout.stages import Stages
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, exit_name
from megascale.layout.topology import DATA_AXES, inner_axes, topology_of
from megascale.plan.account import activations
from megascale.plan.account.optimizer_state import StageOptimizer
from megascale.plan.account.rank_actions import (
    ChunkBytes,
    peak_of,
    posted_on_paths,
    posted_receives,
    rank_order,
    representative_microbatches,
)
from megascale.plan.account.sizes import gathered_bytes, micro_batch_sizes
from megascale.plan.account.state_bytes import THIS_TRAINER, StateBytes, WeightStorage, fetched_bytes, state_bytes
from megascale.schedule.ir import RankSchedule, live_counts, most_live, parts, weights_at_once

MAX_ACTIONS = 2_000_000  # most actions of a pipeline with a walk through every stage
TOKEN_IDS = 16  # bytes of a token's id and label
CODED = 4  # bytes for an element of a bucket: of two in reduction the codes, sent and received


@dataclass(frozen=True)
class RankMemory(StateBytes):
    """Bytes on one rank at the peak. `activations`: saved for backward; `transient`: a bound on temporary tensors, with
    unsharded gradients, all-gathered weights, receive buffers and tokens; or what is more, of an update.
    """

    activations: int
    transient: int


@dataclass(frozen=True)
class JobMemory:
    """Memory of the ranks of a resolved configuration. `imbalance`: of the loads of experts."""

    config: RunConfig
    storage: WeightStorage = THIS_TRAINER
    imbalance: float = 1.0

    @cached_property
    def layout(self) -> Stages:
        return stages_of(self.config.model, self.config.parallel)

    @cached_property
    def sizes(self) -> MicroBatchSizes:
        return micro_batch_sizes(self.config, self.imbalance)

    @cached_property
    def layer(self) -> Callable[[int, RecomputePolicy], UnitBytes]:
        """The bytes of a layer by its number."""
        fp8 = fp8_layers(self.config.model, self.config.train, self.config.fp8)
        return activations.layer_bytes(self.sizes, fp8)

    @property
    def _microbatches(self) -> int:
        """Micro-batches per rank and step; of planned ones, which may be more than the least, enough for all stages."""
        m, p = self.config.num_microbatches, self.config.parallel
        return max(m, p.pp) if p.hybrid_dp else m

    @property
    def _coded(self) -> bool:
        """True if gradients are reduced as FP8 codes: full ones are freed as the reduction begins."""
        return self.config.parallel.grad_reduce == "fp8" and self.config.dp * self.config.parallel.cp > 1

    def by_stage(self) -> list[RankMemory]:
        """Account for a rank of every pipeline stage. In a pipeline of over `MAX_ACTIONS` the inner stages of a run of
        stages with equal chunks are interpolated, within 4% of a walk.
        """
        p = self.config.parallel
        if 2 * p.pp * p.vpp * representative_microbatches(p.pp, self._microbatches) <= MAX_ACTIONS:
            return [self.rank(stage) for stage in range(p.pp)]
        starts = self._starts()
        walked = {stage: self.rank(stage) for stage in sorted({*starts, *(s - 1 for s in starts[1:]), p.pp - 1})}
        ranks = list[RankMemory]()
        for stage in range(p.pp):
            low = max(known for known in walked if known <= stage)
            high = min(known for known in walked if known >= stage)
            share = (stage - low) / max(1, high - low)
            pairs = zip(vars(walked[low]).values(), vars(walked[high]).values(), strict=True)
            ranks.append(RankMemory(*(round(first + share * (second - first)) for first, second in pairs)))
        return ranks

    def fullest(self, limit: float = math.inf) -> RankMemory:
        """Find the rank with the highest peak, or the first rank over `limit` bytes. In a run of stages with equal
        chunks the first stage has most micro-batches in flight. Both ends of the pipeline are tried first.
        """
        last, fullest = self.config.parallel.pp - 1, self.rank(0)
        for stage in dict.fromkeys([last, *self._starts()]) if last else ():
            if fullest.total > limit:
                break
            fullest = max(fullest, self.rank(stage), key=lambda rank: rank.total) if stage else fullest
        return fullest

    def rank(self, stage: int) -> RankMemory:
        """Account for a rank of a stage, in the phase of `fp8.schedule` with the highest peak. With forward in bf16 it
        has bf16's activations and FP8's weights.
        """
        if not self.config.fp8.schedule:
            return self._rank(stage)
        ranks = [[memory._rank(stage) for memory in phase] for phase in self._phases]
        joined = [RankMemory(*map(max, *(vars(rank).values() for rank in both))) for both in ranks]
        return max(joined, key=lambda rank: rank.total)

    @cached_property
    def _phases(self) -> list[list[JobMemory]]:
        """The memory of each phase; of two configurations if forward is in bf16."""
        found = list[list[JobMemory]]()
        for phase in self.config.phases:
            fp8 = phase.model_copy(update={"fp8": phase.fp8.model_copy(update={"schedule": []})})
            in_bf16 = fp8.model_copy(update={"train": fp8.train.model_copy(update={"precision": "bf16"})})
            found.append([replace(self, config=each) for each in (fp8, in_bf16 if phase.fp8.schedule else fp8)])
        return found

    def _rank(self, stage: int) -> RankMemory:
        """Account for a rank of a stage, with posted receives, tokens, and two all-gathered units in ZeRO-3."""
        config, p, sizes = self.config, self.config.parallel, self.sizes
        m, units = self._microbatches, self._units(stage)
        received = sizes.stream if stage else 0  # the input of a dropped chunk
        known = p.zero == 3 or self._coded or (p.zero == 2 and config.train.freeze)
        held = bucket_sizes(config.model, p, config.overlap, config.train, stage) if known else [[]] * len(units)
        chunks = [*map(self._sharded_chunk if p.zero == 3 else self._chunk, units, held)]
        if p.zero >= 2:
            pairs = zip(chunks, self._fused(stage), strict=False)  # a chunk of the vocabulary has no loss in forward
            chunks[: p.vpp] = [chunk._replace(fused=fused) for chunk, fused in pairs]
        saved, transient = peak_of(self._order(stage), chunks, received)
        if config.num_chunks > 1:
            layers = self.layout.layers(self.layout.index(stage, 0))
            tokens = config.batch.micro * config.model.seq_length
            saved += activations.key_store_bytes(sizes, layers, tokens, config.num_chunks)
        if p.pp > 1 and p.schedule:
            posted = posted_receives(p.schedule, p.pp, p.vpp, m, stage)
            posted = posted_on_paths(self.layout.placement, m)[stage] if p.skip_ratio else posted
            transient += posted * sizes.message
        if p.vocab_pp:  # four sums on their way, ids and their masks, unsharded gradients
            transient += 4 * sizes.stream + min(m, 2 * p.pp + p.vocab_pp) * (activations.TOKEN + 1) * sizes.tokens
            shared = bucket_sizes(config.model, p, config.overlap, config.train, stage, [p.vpp])
            transient += sizes.wide * sum(b.numel for b in shared[0] if not b.frozen) if p.zero == 2 else 0
        if stage in token_ranks(config.model, p):
            last = stage == self.layout.placement.ends[1]
            depths, soft = (config.model.mtp_layers, config.train.soft_tokens) if last else (0, 0)
            transient += (TOKEN_IDS * (1 + depths) + ENTRY_BYTES * soft) * sizes.tokens * m
        state = state_bytes(config, stage, self.storage)
        updated = max(StageOptimizer(config, stage).update_bytes(), fetched_bytes(config, stage))
        transient = max(transient, updated - saved)
        transient += self._gathered(held) if p.zero == 3 else 0
        if self._coded:
            largest = max(chain(*held), key=lambda bucket: bucket.numel)
            transient += CODED * largest.numel
            transient += 2 * sizes.wide * largest.shard(topology_of(p)) if p.zero >= 2 else 0
        return RankMemory(state.parameters, state.gradients, state.optimizer, saved, transient)

    def with_policies(self, train: TrainConfig) -> JobMemory:
        """Return the memory with the policies of layers of another `[train]`, which differs in nothing else."""
        changed = replace(self, config=self.config.model_copy(update={"train": train}))
        for name in ("layout", "sizes", "layer"):  # which do not depend on them
            vars(changed)[name] = getattr(self, name)
        return changed

    def layers(self, stage: int) -> Iterator[tuple[int, int, RecomputePolicy, UnitBytes]]:
        """List the chunks and numbers of a stage's layers, with their policies and bytes."""
        for chunk in range(self.layout.vpp):
            for layer in self.layout.layers(self.layout.index(stage, chunk)):
                policy = recompute_policy(self.config.train, layer)
                yield chunk, layer, policy, self.layer(layer, policy)

    def least_transient(self, stage: int) -> int:
        """Bound the transient bytes of a rank of a stage while most is saved, at the end of a chunk: of its forward,
        and of its backward, with the unsharded gradients of ZeRO-2.
        """
        c = self.config
        wide = self.sizes.wide if c.parallel.zero == 2 and not c.train.freeze else 0
        held = [(units[-1], wide * sum(unit.elements for unit in units)) for units in self._units(stage) if units]
        return min((max(last.forward, last.backward + unsharded) for last, unsharded in held), default=0)

    def live_counts(self, stage: int) -> set[tuple[int, ...]]:
        """Count the micro-batches of a rank of a stage that are in flight at a time, by chunk."""
        freed = [part for entry in self._order(stage) for part in reversed(parts(entry))]  # pairs free as they allocate
        return live_counts(freed, self.layout.vpp)

    def moved_bytes(self, stage: int, store: str) -> int:
        """Count the most bytes of saved tensors that a rank of a stage has in a store, "host" or "nvme"."""
        moved = self._moved(stage, store)
        return most_live(self._order(stage), moved) if any(moved) else 0

    def most_moved(self, store: str) -> int:
        """Count the most bytes of saved tensors that a rank has in a store."""
        return max(self.moved_bytes(stage, store) for stage in range(self.config.parallel.pp))

    def moved_in_step(self, stage: int, store: str) -> int:
        """Count the bytes that a rank of a stage writes to a store in a step."""
        visits, m = self.layout.placement.visits, self.config.num_microbatches
        return sum(size * visits(stage, chunk, m) for chunk, size in enumerate(self._moved(stage, store)))

    def _moved(self, stage: int, store: str) -> list[int]:
        """List by chunk the bytes that a micro-batch of a rank of a stage has in a store."""
        sizes = [0] * self.layout.vpp
        for chunk, _, policy, unit in self.layers(stage):
            sizes[chunk] += unit.moved if policy.store == store else 0
        return sizes

    def _order(self, stage: int) -> RankSchedule:
        """List the actions of a rank, as `rank_order` does."""
        c = self.config
        order = rank_order(c.parallel, self._microbatches, c.num_chunks, c.data.sequence_chunks_saved, stage)
        return weights_at_once(order, joined_chunks(c.train, c.parallel, self.layout))

    def _units(self, stage: int) -> list[list[UnitBytes]]:
        """List the units of a rank's chunks. Depths of multi-token prediction share the weight of the head."""
        model, chunks = self.config.model, list[list[UnitBytes]]()
        head = early = activations.head_bytes(self.sizes)
        further = head._replace(saved=self.sizes.stream, backward=0, elements=0)  # without a norm
        on_one_rank = len({*self.layout.placement.ends}) == 1 and self.layout.count > 1  # of a V
        copied = model.embeds_last and self.layout.placement.p > 1 and not (model.tie_embeddings and on_one_rank)
        tables = (not model.tie_embeddings) + copied
        head = activations.head_bytes(self.sizes, self.config.train.soft_tokens)
        head = head._replace(elements=tables * head.elements)
        begin_unit, end_unit = activations.embedding_bytes(self.sizes), head
        if barriers := self.config.parallel.vocab_pp:
            begin_unit, end_unit = activations.stage_ends(self.sizes)
        for chunk in range(self.layout.vpp):
            index, policy = self.layout.index(stage, chunk), partial(recompute_policy, self.config.train)
            begin = [] if chunk or not self.sizes.documents else [activations.angle_bytes(self.sizes)]
            begin += [begin_unit] if index == 0 else []
            units, layers = begin, self.layout.layers(index)
            for layer in (layer for layer in layers if layer < model.num_layers):
                units += [self.layer(layer, policy(layer)), *([early] if layer + 1 in model.exits else [])]
            units += [end_unit] if index == self.layout.count - 1 else []
            for layer in (layer for layer in layers if layer >= model.num_layers):
                units += [self.layer(layer, policy(layer)), further]
            chunks.append(activations.with_copies(units))
        shared = [[activations.vocabulary_bytes(self.sizes, self.layout.placement.p, barriers)]] if barriers else []
        return chunks + shared

    def _fused(self, stage: int) -> list[tuple[tuple[int, int], ...]]:
        """List by chunk the owners and bytes of buckets with heads: losses in a forward add to their gradients."""
        c, size, found = self.config, self.sizes.wide, list[tuple[tuple[int, int], ...]]()
        indices = [self.layout.index(stage, chunk) for chunk in range(self.layout.vpp)]
        if not any(count_heads(c.model, self.layout, index) for index in indices):
            return [()] * len(indices)
        held = bucket_sizes(c.model, c.parallel, c.overlap, c.train, stage, range(self.layout.vpp))
        for index in indices:
            heads = {f"{exit_name(after)}.{HEAD}" for after in exits_of(c.model, self.layout, index)}
            if index == self.layout.count - 1:
                heads.add(TOKEN_EMBEDDING if c.model.tie_embeddings else HEAD)
            sums = [size * sum(b.numel for b in buckets if b.tables & heads and not b.frozen) for buckets in held]
            found.append(tuple((owner, total) for owner, total in enumerate(sums) if total))
        return found

    def _gathered(self, held: Sequence[Sequence[BucketSize]]) -> int:
        """Size the memory for gathered weights of chunks with sharded ones: of a pool of two units, of the largest
        chunk, or of all. A head that is tied to an embedding of its chunk uses it.
        """
        reshard, chunks = self.config.parallel.resharding, [_by_module(buckets) for buckets in held]
        modules = [[sum(gathered_bytes(self.config, b) for b in module) for module in chunk] for chunk in chunks]
        if reshard == "forward":
            pooled = max(chain(*modules), default=0)
            if self._ties_chunk:
                pooled = max(pooled, modules[0][0] + modules[0][-1])
            return 2 * pooled
        of_chunks = [sum(chunk) for chunk in modules]
        return sum(of_chunks) if reshard == "keep" else max(of_chunks, default=0)

    @property
    def _ties_chunk(self) -> bool:
        """True if the only chunk of a rank has both the embedding and a head that is tied to it."""
        return self.config.model.tie_embeddings and self.layout.count == 1

    def _sharded_chunk(self, units: Sequence[UnitBytes], buckets: Sequence[BucketSize]) -> ChunkBytes:
        """Account for a chunk with sharded weights. The gradient of a tied embedding begins in the head."""
        topology, size = topology_of(self.config.parallel), self.sizes.wide
        gradients, whole = list[activations.UnitGradients](), self.storage.gradient_bytes or size
        for module in _by_module(buckets):
            trained = [bucket for bucket in module if not bucket.frozen]
            full, shard = whole * sum(b.numel for b in trained), size * sum(b.shard(topology) for b in trained)
            in_flight = shard + (full if shard < full else 0)  # a single rank frees the full one at once
            waits = self.config.overlap.dp and not self._coded
            gradients.append(activations.UnitGradients(full, shard, in_flight if waits else 0))
        gradients = [activations.UnitGradients(0, 0, 0)] * (len(units) - len(gradients)) + gradients  # angles are first
        tied = gradients[0].full if self._ties_chunk else 0
        left = [sum(unit.left for unit in units[at + 1 :]) for at in range(len(units))]
        works = [(unit.backward + waiting, unit.saved) for unit, waiting in zip(units, left, strict=True)]
        first, later = activations.by_unit(works, gradients)
        weights = activations.by_unit([(unit.wgrad, unit.left) for unit in units], gradients)
        chunk = activations.chunk_bytes(units)
        return ChunkBytes(
            chunk._replace(backward=later + tied), first + tied, gradients[0].reducing,
            later + tied - chunk.backward, by_unit=(weights[0] + tied, weights[1] + tied),
        )  # fmt: skip

    def _starts(self) -> list[int]:
        """List the first stages of runs of stages with equal chunks."""
        units = [*map(self._units, range(self.layout.placement.p))]
        return [stage for stage in range(len(units)) if stage == 0 or units[stage] != units[stage - 1]]

    def _chunk(self, units: Sequence[UnitBytes], buckets: Sequence[BucketSize]) -> ChunkBytes:
        """Account for a chunk. In ZeRO-2 a backward writes unsharded gradients, then reduced to shards: unit by unit,
        or with overlap in the background until the next backward. All units have an equal share of trained elements.
        """
        chunk, overlap = activations.chunk_bytes(units), self.config.overlap.dp and not self._coded
        if self.config.parallel.zero != 2:
            return ChunkBytes(chunk, chunk.backward)
        trained = 1 - sum(b.numel for b in buckets if b.frozen) / max(1, sum(b.numel for b in buckets))
        size, topology = trained * self.sizes.wide, topology_of(self.config.parallel)
        counts = topology.size(*inner_axes(DATA_AXES)), topology.edp_shard
        # with one rank the shard is the gradient itself
        dense, experts = (size / ranks if ranks > 1 or not overlap else 0.0 for ranks in counts)
        unsharded = int(size * chunk.elements)
        follows = activations.chunk_bytes(units, (dense, experts), overlap)
        reducing = unsharded + activations.shard_bytes(chunk, (dense, experts)) if overlap else 0
        whole = chunk._replace(backward=chunk.backward + unsharded)
        return ChunkBytes(whole, follows.backward + unsharded, reducing, unsharded, shards=follows.wgrad - chunk.wgrad)


def _by_module(buckets: Sequence[BucketSize]) -> list[list[BucketSize]]:
    """Group a chunk's buckets by their modules, in the order of the network."""
    modules = dict[str, list[BucketSize]]()
    for bucket in buckets:
        modules.setdefault(bucket.first_module, []).append(bucket)
    return [*modules.values()]
