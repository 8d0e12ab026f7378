"""Collectives and messages of a rank in a step, from the configuration: calls and bytes as in its event log.

With W = s b h B bytes of an activation of a micro-batch and sequence parallelism, a column-parallel layer all-gathers W
in its forward and for wgrad, and reduce-scatters its input's gradient; a row-parallel layer reduce-scatters its sum and
all-gathers its gradient. Without it all-reduces stand in place of the reduce-scatters (Korthikanti et al. 2022, 4.2).
For N elements in buckets, of a bytes in the accumulation dtype and c in the compute dtype, data parallelism all-reduces
a N (zero = 0), or reduce-scatters a N (zero = 2: each micro-batch) and all-gathers c N.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout.blocks import Block, Columns, Rows, block, linears, operands, unread
from megascale.layout.buckets import Bucket, pack
from megascale.layout.chunks import chunk_buckets, eight_bit_layers, shares_embedding, stages_of
from megascale.layout.loss import loss_chunks
from megascale.layout.pieces import PIECE_BYTES, PIECES, pieces_of
from megascale.layout.recompute import Recompute, recompute_of
from megascale.layout.tensors import TOKEN_EMBEDDING, padded_vocab
from megascale.layout.topology import AT_ONCE, DATA, Coord, topology_of

FP32, FP64 = 4, 8
"""Bytes of an FP8 scale or amax, and of an element that the whole job sums."""

SCALE_BLOCK = 128
"""Elements of a row that share a scale where the grain is a block (`ops.fp8`)."""

TOTALS = 6
"""Elements that a step sums over the job: loss, tokens, ranks that stop, two of checkpoints, the squared norm."""


class Sent(NamedTuple):
    """A communication in `group`. `bytes`: of the whole tensor concerned, sent in `calls` pieces. `label`: its name in
    the event log, without the layer. `times`: in a step, or for a micro-batch.
    """

    group: str
    operation: str
    bytes: int
    label: str
    calls: int = 1
    times: int = 1


def step_traffic(config: RunConfig, coord: Coord) -> dict[tuple[str, str], tuple[int, int]]:
    """Sum the calls and the bytes that the rank at `coord` of a resolved configuration sends and receives in a step, by
    (group, operation). The first step of a run has more where FP8 scales have no history yet.
    """
    traffic: dict[tuple[str, str], tuple[int, int]] = {}
    for part in (_tensor_parallel, _messages, _gradients, _optimizer, _totals):
        for sent in part(config, coord):
            kind = sent.group, sent.operation
            count, nbytes = traffic.get(kind, (0, 0))
            traffic[kind] = count + sent.times * sent.calls, nbytes + sent.times * sent.bytes
    return traffic


def calls(config: RunConfig) -> float:
    """Count the communications of a rank in a step, the mean over a pipeline."""
    pp = config.parallel.pp
    return sum(count for stage in range(pp) for count, _ in step_traffic(config, Coord(pp=stage)).values()) / pp


def message_bytes(config: RunConfig) -> int:
    """Size a message between two stages: a tp rank sends its part of the boundary's activation."""
    m, (compute, _) = config.model, _bytes(config)
    return m.seq_length * config.batch.micro * m.hidden_size * compute // config.parallel.tp


def replicas(config: RunConfig) -> int:
    """Count the ranks that reduce a bucket, and shard it: those of data and context parallelism."""
    return topology_of(config).size(*DATA)


def block_traffic(config: RunConfig, described: Block, fp8: bool, recompute: Recompute) -> Iterator[Sent]:
    """List what a block sends over tp for a micro-batch, in order, and then once a step, when weights are cast. `fp8`:
    its linear layers multiply in FP8.
    """
    tp = _TensorParallel(config, fp8)
    groups = [part for part in described if isinstance(part, Columns | Rows)]
    forward = [sent for group in groups for sent in tp.layers(group)]
    backward = [sent for group in reversed(groups) for sent in tp.layers(group, backward=True)]
    needed = len(forward) - (1 if unread(described) else 0)  # all but the last sum
    recomputed = forward[:needed] if recompute.full else []
    for sent in (*forward, *recomputed, *backward):
        yield sent._replace(times=config.micro_batches)
    for layer in linears(described):
        yield from tp.amaxes(f"{layer.name}.weight", 1, config.model.hidden_size)


class _TensorParallel:
    """The collectives over tp of a micro-batch of `batch` sequences of `rows` tokens. `cut`: the residual stream is cut
    along the sequence, into `parts`; `pieces`: the most in which a collective overlaps with a GEMM; `width`: bytes of
    an element; `grain`: what shares a scale in FP8, empty in other dtypes; `current`: that of the tensor itself.
    """

    def __init__(self, config: RunConfig, fp8: bool = False) -> None:
        p, facts = config.parallel, RECIPES[config.fp8.recipe].facts
        self.cut, self.parts = p.sp, p.tp if p.sp else 1
        self.pieces, self.width = PIECES if config.overlap.tp else 1, _bytes(config)[0]
        self.rows, self.batch = config.model.seq_length, config.batch.micro
        self.grain, self.current = facts["grain"] if fp8 else "", facts["scale"] == "current"

    def layers(self, group: Columns | Rows, backward: bool = False) -> Iterator[Sent]:
        """List what layers side by side send in their forward or backward: what all ranks need whole is all-gathered,
        the input of column-parallel layers and the gradient of row-parallel ones; the others' is summed, at the end.
        """
        first, column = group.layers[0], isinstance(group, Columns)
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
            yield from self.gather(f"{group.label} again", self.rows, size * width)
        yield self.reduce(label, self.rows, size * self.width, overlap=not backward)

    def gather(self, label: str, rows: int, width: int, overlap: bool = False) -> list[Sent]:
        """All-gather `rows` positions of `width` bytes, if they are cut. `overlap`: with a GEMM, in pieces."""
        return [self._collective("all_gather", label, rows, width, overlap)] if self.cut and width else []

    def reduce(self, label: str, rows: int, width: int, overlap: bool = False) -> Sent:
        """Sum `rows` positions over ranks; each gets its part where the residual stream is cut."""
        return self._collective("reduce_scatter" if self.cut else "all_reduce", label, rows, width, overlap)

    def amaxes(self, operand: str, tensors: int, rows: int) -> list[Sent]:
        """All-reduce the amax of each of `tensors`, or of each of `rows`, of an FP8 operand, by what shares a scale."""
        count = {"tensor": tensors, "row": rows}.get(self.grain, 0) if self.current else 0
        return [Sent("tp", "all_reduce", count * FP32, f"{operand} magnitude")] if count else []

    def _collective(self, operation: str, label: str, rows: int, width: int, overlap: bool) -> Sent:
        nbytes = rows * self.batch * width
        pieces = max(1, min(self.pieces, nbytes // self.parts // PIECE_BYTES)) if overlap else 1
        return Sent("tp", operation, nbytes, label, min(pieces, rows // self.parts))


def _ends(config: RunConfig, first: bool, last: bool) -> Iterator[Sent]:
    """List what the embedding and the head send for a micro-batch. The loss is formed chunk by chunk of tokens."""
    tp, columns = _TensorParallel(config), padded_vocab(config.model, config.parallel.tp) // config.parallel.tp
    width, wide = config.model.hidden_size * tp.width, _bytes(config)[1]
    if first:
        yield tp.reduce("embedding", tp.rows, width)
        yield from tp.gather("embedding gradient", tp.rows, width)
    local = tp.rows // tp.parts
    for chunk in pieces_of(local, loss_chunks(local, tp.rows * tp.batch, columns)) if last else []:
        rows = (chunk.stop - chunk.start) * tp.parts
        yield from tp.gather("head", rows, width, overlap=True)
        yield Sent("tp", "all_reduce", rows * tp.batch * wide, "loss peak")
        yield Sent("tp", "all_reduce", 2 * rows * tp.batch * wide, "loss sums")
        yield tp.reduce("head gradient", rows, width)


def _tensor_parallel(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """List what a rank sends over tp in its units, and to all-gather boundaries, of which each rank receives a part."""
    p, m = config.parallel, config.micro_batches
    layout, fp8 = stages_of(config), eight_bit_layers(config)
    for chunk in range(p.vpp if p.tp > 1 else 0):
        index, recompute = layout.index(coord.pp, chunk), recompute_of(config.train, chunk)
        first, last = index == 0, index == layout.count - 1
        blocks = Counter((block(config.model, layer), layer in fp8) for layer in layout.layers(index))
        for kind, count in blocks.items():
            yield from (sent._replace(times=count * sent.times) for sent in block_traffic(config, *kind, recompute))
        yield from (sent._replace(times=m) for sent in _ends(config, first, last))
        for _ in range(0 if p.sp else (not first) + (not last)):
            yield Sent("tp", "all_gather", message_bytes(config) * p.tp, "boundary", times=m)


def _messages(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """List the messages between stages. Those to a later rank of the pipeline go up, those to an earlier one down."""
    layout, size = stages_of(config), message_bytes(config)
    for chunk, step in itertools.product(range(layout.vpp), (-1, 1)):
        neighbour = layout.index(coord.pp, chunk) + step
        if layout.pp > 1 and 0 <= neighbour < layout.count:
            there, back = ("pp.up", "pp.down") if neighbour % layout.pp > coord.pp else ("pp.down", "pp.up")
            yield Sent(there, "send", size, "boundary", times=config.micro_batches)
            yield Sent(back, "receive", size, "boundary", times=config.micro_batches)


def _gradients(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """List the collectives of each bucket: over data parallelism, of norms over tp, and of a shared embedding."""
    p, ranks = config.parallel, replicas(config)
    compute, wide = _bytes(config)
    operation, times = "reduce_scatter" if p.zero else "all_reduce", config.micro_batches if p.zero == 2 else 1
    for bucket in _buckets(config, coord.pp):
        low, high = bucket.shard(topology_of(config).index(coord, *DATA)) if p.zero else (0, bucket.size)
        if ranks > 1:
            yield Sent("dp", operation, wide * bucket.size, "gradients", times=times)
        if ranks > 1 and p.zero:
            yield Sent("dp", "all_gather", compute * bucket.size, "weights")
        norms = min(bucket.whole[1], high) - max(bucket.whole[0], low)
        if p.sp and p.tp > 1 and norms > 0:
            yield Sent("tp", "all_reduce", wide * norms, "norms")
        if shares_embedding(config) and [slot.parameter.name for slot in bucket.slots] == [TOKEN_EMBEDDING]:
            yield Sent("tied", "all_reduce", wide * (high - low), "embedding")


def _optimizer(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """List the sums of squared norms of weights and of updates, where the optimizer needs them."""
    if OPTIMIZERS[config.optimizer.name].facts["needs"] != "norms":
        return
    p = config.parallel
    matrices = sum(slot.parameter.is_matrix for bucket in _buckets(config, coord.pp) for slot in bucket.slots)
    for group, size in (("tp", p.tp), ("dp", replicas(config) if p.zero else 1)):
        if size > 1:
            yield Sent(group, "all_reduce", 2 * FP64 * matrices, "parameter norms")
    if shares_embedding(config) and coord.pp in (0, p.pp - 1):
        yield Sent("tied", "all_reduce", 2 * FP64, "parameter norms")


def _totals(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """List the sums over the whole job, in a large one over one axis after another."""
    layers = eight_bit_layers(config) if RECIPES[config.fp8.recipe].facts["scale"] == "history" else []
    amaxes = FP32 * sum(len(list(operands(block(config.model, layer)))) for layer in layers)
    axes = {"world.dp": replicas(config), "world.tp": config.parallel.tp, "world.pp": config.parallel.pp}
    groups = {"world": config.world} if config.world <= AT_ONCE else axes
    for number, (group, size) in enumerate(groups.items()):
        if size > 1 and amaxes:
            yield Sent(group, "all_reduce", amaxes, "fp8 magnitudes")
        if size > 1:
            operation, parts = ("all_gather", size) if number else ("all_reduce", 1)
            yield Sent(group, operation, FP64 * TOTALS * parts, "totals")


def _buckets(config: RunConfig, pp_rank: int) -> list[Bucket]:
    """Pack the buckets of a pipeline rank as they are reduced and gathered; sizes are in elements."""
    topology = topology_of(config)
    return [pack(bucket, topology) for chunk in chunk_buckets(config, pp_rank) for bucket in chunk]


def _bytes(config: RunConfig) -> tuple[int, int]:
    """Bytes of an element in the compute and in the accumulation dtype."""
    facts = PRECISIONS[config.train.precision].facts
    return facts["compute_bytes"], facts["accumulate_bytes"]
