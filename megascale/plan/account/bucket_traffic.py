"""Communication of a rank's gradient buckets in a step, and of the optimizer on them (`BucketTraffic`).

For N elements in buckets, a bytes in the accumulation dtype and c in the compute dtype, data parallelism all-reduces
a N (zero = 0), or reduce-scatters a N (zero = 2 or 3: every micro-batch) and all-gathers c N (zero = 3: as often as
`parallel.reshard` says, with "forward" up to twice every micro-batch; N of FP8 codes). Copies of a shard of n inner
ranks all-reduce a N / n besides, once; or if they shard the state, reduce-scatter that and all-gather c N / n.
With `parallel.grad_reduce` = "fp8" an exchange of N (n - 1) / n bytes is in the place of a reduce-scatter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.recipes import QuantizerSpec
from megascale.config.run import RunConfig
from megascale.layout.buckets import BucketLayout, pack
from megascale.layout.chunks import BucketSize, chunk_buckets, module_of, shares_embedding, stages_of
from megascale.layout.parts.microbatch_sizes import FP32, CommOp
from megascale.layout.tensors import TOKEN_EMBEDDING
from megascale.layout.topology import DATA_AXES, Coord, Topology, topology_of
from megascale.plan.account.optimizer_state import is_mixed
from megascale.plan.account.sizes import coded_elements, step_gather_bytes
from megascale.plan.account.stage_matrices import exchange_axes, sent_elements, stage_places
from megascale.schedule.lower import compute_order
from megascale.schedule.resharding import count_gathers

FP64 = 8  # bytes of an element of sums over the job


@dataclass(frozen=True)
class BucketTraffic:
    """The collectives of buckets on the rank at `coord`."""

    config: RunConfig
    coord: Coord

    def all(self) -> Iterator[CommOp]:
        yield from self._gradients()
        yield from self._weights()
        yield from self._amaxes()
        if is_mixed(self.config.optimizer):
            yield from self._matrix_messages()
        if OPTIMIZERS[self.config.optimizer.name].facts["unit_of_work"] == "param_norms":
            yield from self._parameter_norms()

    @cached_property
    def _buckets(self) -> list[tuple[int, BucketLayout]]:
        """The gradient buckets of the pipeline rank, with their chunks; sizes are in elements."""
        c, p = self.config, self.config.parallel
        chunks = chunk_buckets(c.model, p, c.overlap, c.train, self.coord.pp)
        return [(at, pack(bucket, topology_of(p), p.zero)) for at, chunk in enumerate(chunks) for bucket in chunk]

    def _gradients(self) -> Iterator[CommOp]:
        """List the collectives of gradient buckets: over dp or edp, of norms over tp, and of a tied embedding."""
        p, m = self.config.parallel, self.config.num_microbatches
        compute, wide = self.config.train.element_bytes
        topology, shared = topology_of(p), shares_embedding(self.config.model, p)
        placement = stages_of(self.config.model, p).placement
        for chunk, bucket in ((chunk, bucket) for chunk, bucket in self._buckets if not bucket.frozen):
            axes, sharded = bucket.inner_axes or bucket.reduce_axes, bucket.shard_axes
            ranks, group = topology.size(*axes), group_name(topology, axes)
            operation, times = "reduce_scatter" if sharded.state else "all_reduce", 1
            if sharded.gradient and not bucket.shares_vocabulary:  # whose gradients are reduced at the step's end
                times = placement.visits(self.coord.pp, chunk, m)
            low, high = bucket.state_range(topology.index_in_group(self.coord, *sharded.state))
            if ranks > 1 and p.grad_reduce == "fp8":
                yield CommOp(group, "all_reduce", FP32, "gradient amax", times=times)
                yield CommOp(group, "all_to_all", bucket.numel // ranks * (ranks - 1), "gradients", times=times)
            elif ranks > 1:
                yield CommOp(group, operation, wide * bucket.numel, "gradients", times=times)
            if bucket.copies > bucket.state_copies:
                yield CommOp("dp.replicate", "reduce_scatter", wide * bucket.numel // ranks, "gradients")
                yield CommOp("dp.replicate", "all_gather", compute * bucket.numel // ranks, "weights")
            elif bucket.copies > 1:
                yield CommOp("dp.replicate", "all_reduce", wide * bucket.numel // ranks, "gradients")
            start, stop = bucket.summed_over_tp(p.sp)
            partial = min(stop, high) - max(start, low)
            if p.tp > 1 and partial > 0:
                yield CommOp("tp", "all_reduce", wide * partial, "partial gradients")
            if shared and [slot.parameter.name for slot in bucket.slots] == [TOKEN_EMBEDDING]:
                yield CommOp("tied", "all_reduce", wide * (high - low), "embedding")

    def _weights(self) -> Iterator[CommOp]:
        """List the gathers of weights: of codes, and of the rest beside them."""
        c, topology = self.config, topology_of(self.config.parallel)
        for _, bucket in self._buckets:
            axes, size = bucket.inner_axes or bucket.reduce_axes, BucketSize.of(bucket)
            sent, coded = step_gather_bytes(c, size), coded_elements(c, size)
            if not (sent and bucket.shard_axes.state) or topology.size(*axes) == 1:
                continue
            group, times, gathered = group_name(topology, axes), self._gathers(bucket), bucket.numel if coded else sent
            yield CommOp(group, "all_gather", gathered, "weights", times=times)
            if sent > gathered:
                yield CommOp(group, "all_reduce", sent - gathered, "rest", times=times)

    def _amaxes(self) -> Iterator[CommOp]:
        """List the reductions of the amaxes of weights that are gathered as codes."""
        c, topology, blocks = self.config, topology_of(self.config.parallel), Counter[tuple[str, ...]]()
        weight: QuantizerSpec = c.fp8.facts["weight"]
        over_tp = Counter[tuple[str, ...]]()
        for _, bucket in self._buckets if weight.scaling == "current" else ():
            coded = 0 if bucket.frozen else coded_elements(c, BucketSize.of(bucket))
            for slot in (slot for slot in bucket.slots if slot.stop <= coded):
                shape = slot.parameter.local_shape(topology)
                count = math.prod(weight.block.grid(math.prod(shape[:-1]), shape[-1]))
                blocks[bucket.inner_axes] += count
                over_tp[bucket.inner_axes] += count if weight.block.spans(slot.parameter.sharding.get("tp")) else 0
        for axes, count in blocks.items():
            if count and topology.size(*axes) > 1:
                yield CommOp(group_name(topology, axes), "all_reduce", FP32 * count, "fp8 amax")
            if over_tp[axes] and topology.tp > 1:
                yield CommOp("tp", "all_reduce", FP32 * over_tp[axes], "fp8 amax")

    @cached_property
    def _module_gathers(self) -> Counter[str]:
        """Count the gathers of sharded weights by module."""
        c, p, found = self.config, self.config.parallel, Counter[str]()
        stages, reshard = stages_of(c.model, p), p.resharding
        assert reshard is not None and p.schedule is not None, "weights are sharded, and a schedule is named"
        chunks, keep = c.num_chunks, c.data.sequence_chunks_saved
        order = compute_order(p.schedule, stages.placement, c.num_microbatches, parts=chunks, keep=keep)[self.coord.pp]
        for chunk in range(p.vpp):
            index = stages.index(self.coord.pp, chunk)
            modules = ["embedding"] if index == 0 else []
            modules += [f"layers.{layer}" for layer in stages.layers(index)]
            modules += ["head"] if index == stages.count - 1 else []
            found.update(dict(zip(modules, count_gathers(order, reshard, chunk, len(modules)), strict=True)))
        return found

    def _gathers(self, bucket: BucketLayout) -> int:
        """Count the gathers of a bucket's weights: once a step, or if they are sharded, with every use. A head uses the
        embedding that is tied to it.
        """
        if not bucket.shard_axes.weight:
            return 1
        names, found = [slot.parameter.name for slot in bucket.slots], self._module_gathers
        if TOKEN_EMBEDDING not in names or not self.config.model.tie_embeddings:
            return found[module_of(names[0])]
        uses = found["embedding"], found["head"]
        return max(uses) if self.config.parallel.resharding == "keep" else sum(uses)

    def _parameter_norms(self) -> Iterator[CommOp]:
        """List the all-reduces of squared norms of an optimizer such as LAMB."""
        p, topology = self.config.parallel, topology_of(self.config.parallel)
        matrices = Counter[tuple[bool, tuple[str, ...]]]()
        for _, bucket in self._buckets:
            ranges = bucket.matrix_ranges(0, bucket.numel, topology)
            key = bucket.has_experts, bucket.shard_axes.state
            matrices[key] += sum(item.slot.parameter.is_matrix for item in ranges)
        for (has_experts, axes), count in matrices.items():
            shards = group_name(topology, axes) if axes else "", topology.size(*axes)
            for group, size in (("tp", 1 if has_experts else p.tp), shards):
                if size > 1:
                    yield CommOp(group, "all_reduce", 2 * FP64 * count, "parameter norms")
        ends = stages_of(self.config.model, p).placement.ends
        if shares_embedding(self.config.model, p) and self.coord.pp in ends:
            yield CommOp("tied", "all_reduce", 2 * FP64, "parameter norms")

    def _matrix_messages(self) -> Iterator[CommOp]:
        """List the exchanges of whole matrices with their owners, by bucket: gradients there, updates back, and weights
        there for rules that read them. Bytes are those that this rank sends.
        """
        c, topology = self.config, topology_of(self.config.parallel)
        _, wide = c.train.element_bytes
        stage = stage_places(c.model, c.parallel, c.overlap, c.train, c.optimizer, self.coord.pp)
        for layout, places in zip(stage.layouts, stage.places, strict=True):
            axes = layout.shard_axes.state or layout.reduce_axes
            index, group = topology.index_in_group(self.coord, *axes), group_name(topology, axes)
            with_weight = [place for place in places if place.group.facts["weight"]]
            for of_bucket, ways in ((places, 2), (with_weight, 1)):
                there, back = sent_elements(of_bucket, layout, topology, (self.coord.tp, index))
                calls = exchange_axes(of_bucket, layout, topology, index)
                for axis in calls:
                    elements = there[axis] + (back[axis] if ways == 2 else 0)
                    name = group if axis == "dp" else axis
                    yield CommOp(name, "all_to_all", wide * elements, "matrices", calls=ways)


def group_name(topology: Topology, axes: tuple[str, ...]) -> str:
    """Name the group along the axes of a bucket: those along parts of edp have the name of one with the same ranks."""
    name = axes[-1].replace("_", ".")
    if name.startswith("e") and topology.ep == topology.tp:
        return name[1:]
    if name == "edp" and topology.edp_shard == 1 and topology.dp_replicate > 1:
        return "dp.replicate"
    return "tp" if name == "edp" and topology.ep == topology.size(*DATA_AXES) == 1 else name
