"""Communication of a rank in a step, from the configuration: calls and bytes as in the event log (`step_traffic`).

The parts of a block list their collectives over tp and cp (`layout.parts`). For N elements in buckets, a bytes in the
accumulation dtype and c in the compute dtype, data parallelism all-reduces a N (zero = 0), or reduce-scatters a N
(zero = 2: every micro-batch) and all-gathers c N.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout.blocks import BlockSpec, block_spec, fp8_operands, is_skippable, linears, tile_mlp
from megascale.layout.buckets import BucketLayout, pack
from megascale.layout.chunks import chunk_buckets, fp8_layers, shares_embedding, stages_of
from megascale.layout.loss import loss_chunks
from megascale.layout.owners import exchange_axes, sent_elements, stage_places
from megascale.layout.parts.microbatch_sizes import FP32, CommOp, MicroBatchSizes
from megascale.layout.pieces import split_rows
from megascale.layout.recompute_policy import RecomputePolicy, recompute_policy
from megascale.layout.tensors import TOKEN_EMBEDDING, padded_vocab
from megascale.layout.topology import DATA_AXES, MAX_FLAT_REDUCE_RANKS, Coord, Topology, topology_of
from megascale.plan.account.optimizer_state import is_mixed
from megascale.plan.account.sizes import element_bytes, message_bytes, micro_batch_sizes, replicas
from megascale.plan.account.step_totals import step_totals
from megascale.schedule.dependencies import neighbours
from megascale.schedule.ir import forward

FP64 = 8  # bytes of an element of job-wide all-reduces


def step_traffic(config: RunConfig, coord: Coord) -> dict[tuple[str, str], tuple[int, int]]:
    """Sum calls and bytes of a step on the rank at `coord` of a resolved configuration, by (group, operation). A run's
    first step has more where FP8 scales have no history.
    """
    traffic: dict[tuple[str, str], tuple[int, int]] = {}
    for sent in _RankTraffic(config, coord).all():
        kind = sent.group, sent.operation
        count, nbytes = traffic.get(kind, (0, 0))
        traffic[kind] = count + sent.times * sent.calls, nbytes + sent.times * sent.bytes
    return traffic


def mean_calls(config: RunConfig) -> float:
    """Count the collectives and messages of a rank in a step, averaged over the pipeline."""
    pp = config.parallel.pp
    return sum(count for stage in range(pp) for count, _ in step_traffic(config, Coord(pp=stage)).values()) / pp


def block_traffic(sizes: MicroBatchSizes, block: BlockSpec, recompute: RecomputePolicy) -> list[CommOp]:
    """List a block's collectives over tp for a micro-batch, in order."""
    parts = tile_mlp(block, recompute.mlp_tiles)
    sent = [each for part in parts for each in part.traffic(sizes)]
    if recompute.full:
        sent += [each for part in parts for each in part.recomputed_traffic(sizes, is_skippable(block, part))]
    elif recompute.attention:
        sent += [each for part in block if part.core for each in part.traffic(sizes)]
    return sent + [each for part in reversed(parts) for each in part.traffic(sizes, backward=True)]


def context_traffic(sizes: MicroBatchSizes, block: BlockSpec, recompute: RecomputePolicy) -> Iterator[CommOp]:
    """List a block's communication over cp for a micro-batch: exchanges of attention, and amaxes in FP8."""
    for part in block:
        for backward in (False, False, True) if recompute.full else (False, True):
            yield from part.token_amaxes(sizes, backward)
        for backward in (False, False, True) if recompute.full or recompute.attention else (False, True):
            yield from part.context_traffic(sizes, backward)


@dataclass(frozen=True)
class _RankTraffic:
    """The communication of a step on the rank at `coord`."""

    config: RunConfig
    coord: Coord

    def all(self) -> Iterator[CommOp]:
        """List all collectives and messages."""
        yield from self._blocks()
        yield from self._ends()
        yield from self._messages()
        yield from self._gradients()
        if is_mixed(self.config.optimizer):
            yield from self._matrix_messages()
        if OPTIMIZERS[self.config.optimizer.name].facts["unit_of_work"] == "param_norms":
            yield from self._parameter_norms()
        yield from self._totals()

    @cached_property
    def topology(self) -> Topology:
        return topology_of(self.config)

    @property
    def wide(self) -> int:
        """Bytes of an element in the accumulation dtype."""
        return element_bytes(self.config.train.precision)[1]

    @cached_property
    def buckets(self) -> list[BucketLayout]:
        """The gradient buckets of the pipeline rank; sizes are in elements."""
        chunks = chunk_buckets(self.config, self.coord.pp)
        return [pack(bucket, self.topology, self.config.parallel.zero) for chunk in chunks for bucket in chunk]

    def _blocks(self) -> Iterator[CommOp]:
        """List the collectives of blocks over tp and cp: per micro-batch, and once for the amax of FP8 weights."""
        config, p, layout, fp8 = self.config, self.config.parallel, stages_of(self.config), fp8_layers(self.config)
        plain = micro_batch_sizes(config)
        sizes = {quantized: replace(plain, fp8=quantized) for quantized in (False, True)}
        for chunk in range(p.vpp):
            layers, recompute = layout.layers(layout.index(self.coord.pp, chunk)), recompute_policy(config.train, chunk)
            kinds = Counter((block_spec(config.model, layer), layer in fp8) for layer in layers)
            for (block, quantized), count in kinds.items():
                sent = list(context_traffic(sizes[quantized], block, recompute)) if p.cp > 1 else []
                sent += block_traffic(sizes[quantized], block, recompute) if p.tp > 1 else []
                yield from (each._replace(times=count * config.num_microbatches) for each in sent)
                for layer in linears(block) if p.tp > 1 else ():
                    amaxes = sizes[quantized].amaxes(f"{layer.name}.weight", 1, config.model.hidden_size)
                    yield from (each._replace(times=count) for each in amaxes)

    def _ends(self) -> Iterator[CommOp]:
        """List the collectives over tp of embedding, head and received stage boundaries, per micro-batch. The loss is
        computed by chunks of tokens.
        """
        config, p, layout = self.config, self.config.parallel, stages_of(self.config)
        sizes, columns = micro_batch_sizes(config), padded_vocab(config.model, p.tp) // p.tp
        width, local, sent = config.model.hidden_size * sizes.compute, sizes.rows // sizes.parts, list[CommOp]()
        for chunk in range(p.vpp if p.tp > 1 else 0):
            index = layout.index(self.coord.pp, chunk)
            first, last = index == 0, index == layout.count - 1
            if first:
                sent.append(sizes.reduce("embedding", sizes.rows, width))
                sent += sizes.gather("embedding gradient", sizes.rows, width)
            chunks = split_rows(local, loss_chunks(local, sizes.rows * sizes.batch, columns)) if last else []
            for rows in ((part.stop - part.start) * sizes.parts for part in chunks):
                sent += sizes.gather("head", rows, width, overlap=True)
                sent.append(CommOp("tp", "all_reduce", rows * sizes.batch * self.wide, "logits max"))
                sent.append(CommOp("tp", "all_reduce", 2 * rows * sizes.batch * self.wide, "softmax sums"))
                sent.append(sizes.reduce("head gradient", rows, width))
            boundary = CommOp("tp", "all_gather", message_bytes(config) * p.tp, "boundary")
            sent += [boundary] * (0 if p.sp else (not first) + (not last))
        yield from (each._replace(times=config.num_microbatches) for each in sent)

    def _messages(self) -> Iterator[CommOp]:
        """List the messages between stages: up to a higher pipeline rank, down to a lower one."""
        layout, size, m = stages_of(self.config), message_bytes(self.config), self.config.num_microbatches
        for chunk in range(layout.vpp):
            for stage in neighbours(forward(chunk, 0), self.coord.pp, layout.placement):
                if stage is None:
                    continue
                above = layout.placement.places[stage][0] > self.coord.pp
                there, back = ("pp.up", "pp.down") if above else ("pp.down", "pp.up")
                yield CommOp(there, "send", size, "boundary", times=m)
                yield CommOp(back, "receive", size, "boundary", times=m)

    def _gradients(self) -> Iterator[CommOp]:
        """List the collectives of gradient buckets: over dp, of norms over tp, and of a tied embedding."""
        p, m, ranks = self.config.parallel, self.config.num_microbatches, replicas(self.config)
        compute, wide = element_bytes(self.config.train.precision)
        for bucket in self.buckets:
            sharded, index = bucket.shard_axes, self.topology.index_in_group(self.coord, *bucket.reduce_axes)
            operation, times = "reduce_scatter" if sharded.state else "all_reduce", m if sharded.gradient else 1
            low, high = bucket.shard_range(index) if sharded.state else (0, bucket.numel)
            if ranks > 1:
                yield CommOp("dp", operation, wide * bucket.numel, "gradients", times=times)
            if ranks > 1 and sharded.state:
                yield CommOp("dp", "all_gather", compute * bucket.numel, "weights")
            start, stop = bucket.summed_over_tp(p.sp)
            partial = min(stop, high) - max(start, low)
            if p.tp > 1 and partial > 0:
                yield CommOp("tp", "all_reduce", wide * partial, "partial gradients")
            if shares_embedding(self.config) and [slot.parameter.name for slot in bucket.slots] == [TOKEN_EMBEDDING]:
                yield CommOp("tied", "all_reduce", wide * (high - low), "embedding")

    def _parameter_norms(self) -> Iterator[CommOp]:
        """List the all-reduces of squared norms of an optimizer such as LAMB."""
        p, slots = self.config.parallel, (slot for bucket in self.buckets for slot in bucket.slots)
        matrices = sum(len(slot.parameter.parts) for slot in slots if slot.parameter.is_matrix)
        for group, size in (("tp", p.tp), ("dp", replicas(self.config) if p.zero else 1)):
            if size > 1:
                yield CommOp(group, "all_reduce", 2 * FP64 * matrices, "parameter norms")
        if shares_embedding(self.config) and self.coord.pp in (0, p.pp - 1):
            yield CommOp("tied", "all_reduce", 2 * FP64, "parameter norms")

    def _matrix_messages(self) -> Iterator[CommOp]:
        """List the exchanges of whole matrices with their owners, by bucket: gradients there, updates back, and weights
        there for rules that read them. Bytes are those that this rank sends.
        """
        topology = self.topology
        index = topology.index_in_group(self.coord, *DATA_AXES)
        stage = stage_places(self.config, self.coord.pp)
        for layout, places in zip(stage.layouts, stage.places, strict=True):
            with_weight = [place for place in places if place.group.facts["weight"]]
            for of_bucket, ways in ((places, 2), (with_weight, 1)):
                there, back = sent_elements(of_bucket, layout, topology, (self.coord.tp, index))
                calls = exchange_axes(of_bucket, layout, topology, index)
                for axis in calls:
                    elements = there[axis] + (back[axis] if ways == 2 else 0)
                    yield CommOp(axis, "all_to_all", self.wide * elements, "matrices", calls=ways)

    def _totals(self) -> Iterator[CommOp]:
        """List the all-reduces over the whole job; a large job reduces axis by axis."""
        config, p = self.config, self.config.parallel
        layers = fp8_layers(config) if RECIPES[config.fp8.recipe].facts["scaling"] == "delayed" else []
        amaxes = FP32 * sum(len(list(fp8_operands(block_spec(config.model, layer)))) for layer in layers)
        axes = {"world.dp": replicas(config), "world.tp": p.tp, "world.pp": p.pp}
        groups = {"world": config.world_size} if config.world_size <= MAX_FLAT_REDUCE_RANKS else axes
        for number, (group, size) in enumerate(groups.items()):
            if size > 1 and amaxes:
                yield CommOp(group, "all_reduce", amaxes, "fp8 amax")
            if size > 1:
                operation, parts = ("all_gather", size) if number else ("all_reduce", 1)
                yield CommOp(group, operation, FP64 * len(step_totals(config)) * parts, "totals")
