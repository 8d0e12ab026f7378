"""Communication of a rank in a step, from the configuration: calls and bytes as in the event log (`step_traffic`).

For activations of W = s b h B bytes per micro-batch, with sequence parallelism (Korthikanti et al. 2022, 4.2):

    column-parallel  all-gather W in forward, all-gather W for wgrad, reduce-scatter W of dgrad
    row-parallel     reduce-scatter W in forward, all-gather W of the output's gradient

Without sequence parallelism all-reduces replace the reduce-scatters, and no all-gathers are needed. With context
parallelism (`account.context_traffic`) s is a rank's part of a sequence. For N elements in buckets, a bytes in the
accumulation dtype and c in the compute dtype, data parallelism all-reduces a N (zero = 0), or reduce-scatters a N
(zero = 2: every micro-batch) and all-gathers c N.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy

from megascale.catalog.data_policies import DATA_POLICIES
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout import blocks
from megascale.layout.blocks import AttentionSpec, BlockSpec, ColumnParallel, RowParallel, TiledMLP
from megascale.layout.buckets import BucketLayout, pack
from megascale.layout.chunks import chunk_buckets, fp8_layers, shares_embedding, stages_of
from megascale.layout.loss import loss_chunks
from megascale.layout.owners import exchange_axes, sent_elements, stage_places
from megascale.layout.pieces import MAX_PIECES, MIN_PIECE_BYTES, split_rows
from megascale.layout.recompute_policy import RecomputePolicy, recompute_policy
from megascale.layout.tensors import TOKEN_EMBEDDING, padded_vocab
from megascale.layout.topology import DATA_AXES, MAX_FLAT_REDUCE_RANKS, Coord, topology_of
from megascale.plan.account.attended import windows_of
from megascale.plan.account.comm_op import FP32, CommOp, element_bytes
from megascale.plan.account.context_traffic import context_parallel
from megascale.plan.account.optimizer_state import is_mixed
from megascale.schedule.dependencies import neighbours
from megascale.schedule.ir import forward

FP64 = 8  # bytes of an element of job-wide all-reduces
SCALE_BLOCK = 128  # elements of a row with one FP8 scale in block-wise granularity (`ops.fp8`)
TOTALS = 6  # elements of every step's job-wide all-reduce: loss, tokens, stops, two of checkpoints, squared norm


def step_traffic(config: RunConfig, coord: Coord) -> dict[tuple[str, str], tuple[int, int]]:
    """Sum calls and bytes of a step on the rank at `coord` of a resolved configuration, by (group, operation). A run's
    first step has more where FP8 scales have no history.
    """
    traffic: dict[tuple[str, str], tuple[int, int]] = {}
    for part in (_tensor_parallel, context_parallel, _messages, _gradients, _optimizer, _totals):
        for sent in part(config, coord):
            kind = sent.group, sent.operation
            count, nbytes = traffic.get(kind, (0, 0))
            traffic[kind] = count + sent.times * sent.calls, nbytes + sent.times * sent.bytes
    return traffic


def mean_calls(config: RunConfig) -> float:
    """Count the collectives and messages of a rank in a step, averaged over the pipeline."""
    pp = config.parallel.pp
    return sum(count for stage in range(pp) for count, _ in step_traffic(config, Coord(pp=stage)).values()) / pp


def message_bytes(config: RunConfig) -> int:
    """Size a point-to-point message between stages: 1 / tp of an activation."""
    m, (compute, _) = config.model, element_bytes(config)
    return config.row_tokens * config.batch.micro * m.hidden_size * compute // config.parallel.tp


def replicas(config: RunConfig) -> int:
    """Count the ranks with replicas of a bucket, over data and context parallelism."""
    return topology_of(config).size(*DATA_AXES)


def block_traffic(config: RunConfig, block: BlockSpec, fp8: bool, recompute: RecomputePolicy) -> Iterator[CommOp]:
    """List a block's collectives over tp: per micro-batch in order, then once per step for the amax of FP8 weights."""
    tp = _TensorParallel(config, fp8)
    parts = blocks.tile_mlp(block, recompute.mlp_tiles)
    forward = [sent for part in parts for sent in tp.part(part)]
    backward = [sent for part in reversed(parts) for sent in tp.part(part, backward=True)]
    recomputed = list[CommOp]()
    if recompute.full:
        recomputed = [sent for part in parts for sent in tp.recomputed(part, blocks.is_skippable(block, part))]
    elif recompute.attention:
        recomputed = [sent for part in blocks.parts_of_type(block, AttentionSpec) for sent in tp.part(part)]
    for sent in (*forward, *recomputed, *backward):
        yield sent._replace(times=config.num_microbatches)
    for layer in blocks.linears(block):
        yield from tp.amaxes(f"{layer.name}.weight", 1, config.model.hidden_size)


class _TensorParallel:
    """Collectives over tp for a micro-batch of `batch` sequences of `rows` tokens. `cut`: sequence parallelism in
    `parts`; `pieces`: most chunks of a collective overlapped with a GEMM; `width`: bytes of an element; `grain`:
    granularity of FP8 scales, empty in other dtypes; `current`: scales come from the tensor itself; `wide`: bytes of
    an element in the accumulation dtype.
    """

    def __init__(self, config: RunConfig, fp8: bool = False) -> None:
        p, facts = config.parallel, RECIPES[config.fp8.recipe].facts
        self.cut, self.parts = p.sp, p.tp if p.sp else 1
        self.pieces, self.width = MAX_PIECES if config.overlap.tp else 1, element_bytes(config)[0]
        self.rows, self.batch = config.row_tokens, config.batch.micro
        self.grain, self.current = facts["granularity"] if fp8 else "", facts["scaling"] == "current"
        self.wide = element_bytes(config)[1]

    def part(self, part: blocks.BlockPart, backward: bool = False) -> Iterator[CommOp]:
        """List the collectives of a part: of linear layers, and of sums of squares for norms over all heads."""
        if isinstance(part, ColumnParallel | RowParallel):
            yield from self.layers(part, backward)
        elif isinstance(part, TiledMLP):
            yield from self.tiled(part, backward)
        elif isinstance(part, AttentionSpec) and part.qk_norm == "full":
            sums = len(part.qk_norms) * self.rows * self.batch
            yield CommOp("tp", "all_reduce", sums * self.wide, "qk norm gradient" if backward else "qk norm")

    def recomputed(self, part: blocks.BlockPart, skipped: bool) -> Iterator[CommOp]:
        """List the collectives of a part that full recomputation repeats: `skipped` layers repeat no reduction."""
        sent = list(self.part(part))
        yield from sent if not skipped else [] if isinstance(part, TiledMLP) else sent[:-1]

    def tiled(self, part: TiledMLP, backward: bool) -> Iterator[CommOp]:
        """List the collectives of an MLP in tiles; the backward of a tile repeats the first layers."""
        for tile in split_rows(self.rows // self.parts, part.tiles):
            of_tile = copy(self)
            of_tile.rows = (tile.stop - tile.start) * self.parts
            yield from of_tile.layers(part.columns, backward=False)
            yield from of_tile.layers(part.rows, backward)
            yield from of_tile.layers(part.columns, backward) if backward else ()

    def layers(self, group: ColumnParallel | RowParallel, backward: bool = False) -> Iterator[CommOp]:
        """List the collectives of linear layers with a common input or output, as in the table above."""
        first, column = group.layers[0], isinstance(group, ColumnParallel)
        operand, label = ("gradient", f"{group.label} gradient") if backward else ("input", group.label)
        width = 1 if self.grain == "tensor" or (self.grain and not backward) else self.width
        size = first.inputs if column else first.outputs
        if column != backward:
            yield from self.amaxes(f"{first.name}.{operand}", 1 if self.cut else 0, 0)
            scales = {"row": 1, "block": size // SCALE_BLOCK}.get(self.grain, 0) if column else 0
            yield from self.gather(f"{label} scales", self.rows, FP32 * scales)
            yield from self.gather(label, self.rows, size * width, overlap=True)
            return
        for layer in group.layers:
            yield from self.amaxes(f"{layer.name}.{operand}", 1, self.rows * self.batch)
        if backward:  # for wgrad
            yield from self.gather(f"{group.label} wgrad input", self.rows, size * width)
        yield self.reduce(label, self.rows, size * self.width, overlap=not backward)

    def gather(self, label: str, rows: int, width: int, overlap: bool = False) -> list[CommOp]:
        """All-gather `rows` positions of `width` bytes, if `cut`. `overlap`: with a GEMM, in pieces."""
        return [self._collective("all_gather", label, rows, width, overlap)] if self.cut and width else []

    def reduce(self, label: str, rows: int, width: int, overlap: bool = False) -> CommOp:
        """Reduce-scatter `rows` positions of `width` bytes if `cut`, else all-reduce."""
        return self._collective("reduce_scatter" if self.cut else "all_reduce", label, rows, width, overlap)

    def amaxes(self, operand: str, tensors: int, rows: int) -> list[CommOp]:
        """All-reduce an FP8 operand's amaxes, by granularity: of `tensors`, of `rows`, or none."""
        count = {"tensor": tensors, "row": rows}.get(self.grain, 0) if self.current else 0
        return [CommOp("tp", "all_reduce", count * FP32, f"{operand} amax")] if count else []

    def _collective(self, operation: str, label: str, rows: int, width: int, overlap: bool) -> CommOp:
        nbytes = rows * self.batch * width
        pieces = max(1, min(self.pieces, nbytes // self.parts // MIN_PIECE_BYTES)) if overlap else 1
        return CommOp("tp", operation, nbytes, label, min(pieces, rows // self.parts))


def _ends(config: RunConfig, first: bool, last: bool) -> Iterator[CommOp]:
    """List the collectives of embedding and head per micro-batch. The loss is computed by chunks of tokens."""
    tp, columns = _TensorParallel(config), padded_vocab(config.model, config.parallel.tp) // config.parallel.tp
    width, wide = config.model.hidden_size * tp.width, element_bytes(config)[1]
    if first:
        yield tp.reduce("embedding", tp.rows, width)
        yield from tp.gather("embedding gradient", tp.rows, width)
    local = tp.rows // tp.parts
    for chunk in split_rows(local, loss_chunks(local, tp.rows * tp.batch, columns)) if last else []:
        rows = (chunk.stop - chunk.start) * tp.parts
        yield from tp.gather("head", rows, width, overlap=True)
        yield CommOp("tp", "all_reduce", rows * tp.batch * wide, "logits max")
        yield CommOp("tp", "all_reduce", 2 * rows * tp.batch * wide, "softmax sums")
        yield tp.reduce("head gradient", rows, width)


def _tensor_parallel(config: RunConfig, coord: Coord) -> Iterator[CommOp]:
    """List a rank's collectives over tp: of units, and all-gathers of received stage boundaries."""
    p, m = config.parallel, config.num_microbatches
    layout, fp8 = stages_of(config), fp8_layers(config)
    for chunk in range(p.vpp if p.tp > 1 else 0):
        index, recompute = layout.index(coord.pp, chunk), recompute_policy(config.train, chunk)
        first, last = index == 0, index == layout.count - 1
        kinds = Counter((blocks.block_spec(config.model, layer), layer in fp8) for layer in layout.layers(index))
        for kind, count in kinds.items():
            yield from (sent._replace(times=count * sent.times) for sent in block_traffic(config, *kind, recompute))
        yield from (sent._replace(times=m) for sent in _ends(config, first, last))
        for _ in range(0 if p.sp else (not first) + (not last)):
            yield CommOp("tp", "all_gather", message_bytes(config) * p.tp, "boundary", times=m)


def _messages(config: RunConfig, coord: Coord) -> Iterator[CommOp]:
    """List the messages between stages: up to a higher pipeline rank, down to a lower one."""
    layout, size = stages_of(config), message_bytes(config)
    for chunk in range(layout.vpp):
        for stage in neighbours(forward(chunk, 0), coord.pp, layout.placement):
            if stage is None:
                continue
            above = layout.placement.places[stage][0] > coord.pp
            there, back = ("pp.up", "pp.down") if above else ("pp.down", "pp.up")
            yield CommOp(there, "send", size, "boundary", times=config.num_microbatches)
            yield CommOp(back, "receive", size, "boundary", times=config.num_microbatches)


def _gradients(config: RunConfig, coord: Coord) -> Iterator[CommOp]:
    """List the collectives of gradient buckets: over dp, of norms over tp, and of a tied embedding."""
    p, m, ranks = config.parallel, config.num_microbatches, replicas(config)
    compute, wide = element_bytes(config)
    for bucket in _buckets(config, coord.pp):
        sharded, index = bucket.shard_axes, topology_of(config).index_in_group(coord, *bucket.reduce_axes)
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
        if shares_embedding(config) and [slot.parameter.name for slot in bucket.slots] == [TOKEN_EMBEDDING]:
            yield CommOp("tied", "all_reduce", wide * (high - low), "embedding")


def _optimizer(config: RunConfig, coord: Coord) -> Iterator[CommOp]:
    """List the messages of whole matrices, or the all-reduces of squared norms for an optimizer such as LAMB."""
    p = config.parallel
    if is_mixed(config):
        yield from _matrix_messages(config, coord)
    if OPTIMIZERS[config.optimizer.name].facts["unit_of_work"] != "param_norms":
        return
    slots = (slot for bucket in _buckets(config, coord.pp) for slot in bucket.slots)
    matrices = sum(len(slot.parameter.parts) for slot in slots if slot.parameter.is_matrix)
    for group, size in (("tp", p.tp), ("dp", replicas(config) if p.zero else 1)):
        if size > 1:
            yield CommOp(group, "all_reduce", 2 * FP64 * matrices, "parameter norms")
    if shares_embedding(config) and coord.pp in (0, p.pp - 1):
        yield CommOp("tied", "all_reduce", 2 * FP64, "parameter norms")


def _matrix_messages(config: RunConfig, coord: Coord) -> Iterator[CommOp]:
    """List the exchanges of whole matrices with their owners, by bucket: gradients there, updates back, and weights
    there for rules that read them. Bytes are those that this rank sends.
    """
    topology, (_, wide) = topology_of(config), element_bytes(config)
    index = topology.index_in_group(coord, *DATA_AXES)
    stage = stage_places(config, coord.pp)
    for layout, places in zip(stage.layouts, stage.places, strict=True):
        with_weight = [place for place in places if place.group.facts["weight"]]
        for of_bucket, ways in ((places, 2), (with_weight, 1)):
            there, back = sent_elements(of_bucket, layout, topology, (coord.tp, index))
            calls = exchange_axes(of_bucket, layout, topology, index)
            for axis in calls:
                elements = there[axis] + (back[axis] if ways == 2 else 0)
                yield CommOp(axis, "all_to_all", wide * elements, "matrices", calls=ways)


def _totals_of_step(config: RunConfig) -> int:
    """Count the totals of a step: those of every run, and of features. Plug-ins may add totals of their own; those of a
    noise scale that is not measured in every step are left out.
    """
    d, count = config.data, TOTALS
    if config.batch.rampup is not None:
        count += 1  # samples
    if config.train.noise_scale_every == 1:
        count += 3
    if d.mask == "document":
        count += 2 * len(windows_of(config.model))  # scores of attention in both conventions
    if d.policy and DATA_POLICIES[d.policy].facts.get("uses_losses"):
        count += 2 * len(d.train or ())  # loss and tokens
    return count


def _totals(config: RunConfig, coord: Coord) -> Iterator[CommOp]:
    """List the all-reduces over the whole job; a large job reduces axis by axis."""
    layers = fp8_layers(config) if RECIPES[config.fp8.recipe].facts["scaling"] == "delayed" else []
    amaxes = FP32 * sum(len(list(blocks.fp8_operands(blocks.block_spec(config.model, layer)))) for layer in layers)
    axes = {"world.dp": replicas(config), "world.tp": config.parallel.tp, "world.pp": config.parallel.pp}
    groups = {"world": config.world_size} if config.world_size <= MAX_FLAT_REDUCE_RANKS else axes
    for number, (group, size) in enumerate(groups.items()):
        if size > 1 and amaxes:
            yield CommOp(group, "all_reduce", amaxes, "fp8 amax")
        if size > 1:
            operation, parts = ("all_gather", size) if number else ("all_reduce", 1)
            yield CommOp(group, operation, FP64 * _totals_of_step(config) * parts, "totals")


def _buckets(config: RunConfig, pp_rank: int) -> list[BucketLayout]:
    """Pack the gradient buckets of a pipeline rank; sizes are in elements."""
    topology = topology_of(config)
    zero = config.parallel.zero
    return [pack(bucket, topology, zero) for chunk in chunk_buckets(config, pp_rank) for bucket in chunk]
