"""Collectives and messages of a rank in a step, from the configuration: calls and bytes as its event log has them.

With W = s b h B bytes of an activation of a micro-batch, a column-parallel layer all-gathers W with sequence
parallelism, and again for wgrad, and reduce-scatters its input's gradient; a row-parallel layer reduce-scatters its sum
and all-gathers its gradient; without it all-reduces stand in place of the reduce-scatters (Korthikanti et al. 2022,
4.2). For N elements in buckets, of a bytes in the accumulation dtype and c in that of compute, data parallelism
all-reduces a N (zero = 0), or reduce-scatters a N (zero = 2: each micro-batch) and all-gathers c N.
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
from megascale.layout.chunks import chunk_buckets, eight_bit_layers, stages_of
from megascale.layout.loss import loss_chunks
from megascale.layout.pieces import PIECE_BYTES, PIECES, pieces_of
from megascale.layout.recompute import Recompute, recompute_of
from megascale.layout.tensors import TOKEN_EMBEDDING, padded_vocab
from megascale.layout.topology import AT_ONCE, DATA, Coord, topology_of

FP32, FP64 = 4, 8
"""Bytes of an FP8 scale or magnitude, and of a number that the whole job sums."""

SCALE_BLOCK = 128
"""Elements of a row that share a scale where the grain is a block (`ops.fp8`)."""

TOTALS = 6
"""Numbers that a step sums over the job: loss, tokens, ranks that are to stop, two of checkpoints, the squared norm."""


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
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in sent(config, coord):
        counts[each.group, each.operation] += each.times * each.calls
        sizes[each.group, each.operation] += each.times * each.bytes
    return {kind: (count, sizes[kind]) for kind, count in counts.items()}


def sent(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """List the communications of the rank at `coord` in a step."""
    parts = _tensor_parallel, _messages, _gradients, _optimizer, _totals
    return itertools.chain.from_iterable(part(config, coord) for part in parts)


def calls(config: RunConfig) -> float:
    """Count the communications of a rank in a step, the mean over a pipeline."""
    pp = config.parallel.pp
    return sum(each.times * each.calls for rank in range(pp) for each in sent(config, Coord(pp=rank))) / pp


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
    axis = _Axis(config, fp8)
    groups = [part for part in described if isinstance(part, Columns | Rows)]
    forward, backward = map(axis.forward, groups), map(axis.backward, reversed(groups))
    again = [*map(axis.forward, groups)] if recompute.full else []
    if again and unread(described):  # all but a last sum whose result nothing needs
        again[-1] = [each for each in again[-1] if "magnitude" in each.label]
    for each in itertools.chain(*forward, *again, *backward):
        yield each._replace(times=config.micro_batches)
    for layer in linears(described):
        yield from axis.magnitudes(f"{layer.name}.weight", 1, config.model.hidden_size)


class _Axis:
    """The tp group and how activations lie on it: the residual stream is `cut` along the sequence; `rows` and `batch`
    of a micro-batch; `width`, bytes of an element; what shares a scale in FP8 (`grain`, else empty).
    """

    def __init__(self, config: RunConfig, fp8: bool = False) -> None:
        p, facts = config.parallel, RECIPES[config.fp8.recipe].facts
        self.cut, self.parts = p.sp, p.tp if p.sp else 1
        self.pieces, self.width = PIECES if config.overlap.tp else 1, _bytes(config)[0]
        self.rows, self.batch = config.model.seq_length, config.batch.micro
        self.grain, self.current = facts["grain"] if fp8 else "", facts["scale"] == "current"

    def forward(self, group: Columns | Rows) -> list[Sent]:
        """List what layers side by side send in their forward."""
        first, tokens = group.layers[0], self.rows * self.batch
        match group:
            case Rows(layers):
                casts = [self.magnitudes(f"{layer.name}.input", 1, tokens) for layer in layers]
                return [*itertools.chain(*casts), self.reduce(group.label, self.rows, first.outputs * self.width, True)]
            case Columns():
                scales = FP32 * {"row": 1, "block": first.inputs // SCALE_BLOCK}.get(self.grain, 0)
                return [
                    *self.magnitudes(f"{first.name}.input", 1 if self.cut else 0, 0),
                    *(self.gather(f"{group.label} scales", self.rows, scales) if scales else ()),
                    *self.gather(group.label, self.rows, first.inputs * (1 if self.grain else self.width), True),
                ]

    def backward(self, group: Columns | Rows) -> list[Sent]:
        """List what layers side by side send in their backward: in FP8 where one scale serves a tensor."""
        first, width = group.layers[0], 1 if self.grain == "tensor" else self.width
        match group:
            case Rows():
                cast = self.magnitudes(f"{first.name}.gradient", 1 if self.cut else 0, 0)
                return [*cast, *self.gather(f"{group.label} gradient", self.rows, first.outputs * width, True)]
            case Columns(layers):
                casts = [self.magnitudes(f"{layer.name}.gradient", 1, self.rows * self.batch) for layer in layers]
                again = self.gather(f"{group.label} again", self.rows, first.inputs * width)
                reduced = self.reduce(f"{group.label} gradient", self.rows, first.inputs * self.width)
                return [*itertools.chain(*casts), *again, reduced]

    def gather(self, label: str, rows: int, width: int, under: bool = False) -> list[Sent]:
        """All-gather what is cut along the sequence: `rows` positions of `width` bytes. `under`: a GEMM."""
        return [self._in_pieces("all_gather", label, rows, width, under)] if self.cut else []

    def reduce(self, label: str, rows: int, width: int, under: bool = False) -> Sent:
        """Sum over ranks. Each keeps a part where the residual stream is cut."""
        return self._in_pieces("reduce_scatter" if self.cut else "all_reduce", label, rows, width, under)

    def magnitudes(self, operand: str, of_tensor: int, of_rows: int) -> list[Sent]:
        """Exchange the largest magnitudes of an FP8 operand: `of_tensor` or `of_rows` of them, by what has a scale."""
        count = {"tensor": of_tensor, "row": of_rows}.get(self.grain, 0) if self.current else 0
        return [Sent("tp", "all_reduce", count * FP32, f"{operand} magnitude")] if count else []

    def _in_pieces(self, operation: str, label: str, rows: int, width: int, under: bool) -> Sent:
        nbytes = rows * self.batch * width
        pieces = max(1, min(self.pieces, nbytes // self.parts // PIECE_BYTES)) if under else 1
        return Sent("tp", operation, nbytes, label, min(pieces, rows // self.parts))


def _ends(config: RunConfig, first: bool, last: bool) -> Iterator[Sent]:
    """List what the embedding and the head send for a micro-batch. The loss is formed chunk by chunk of tokens."""
    axis, tp = _Axis(config), config.parallel.tp
    width, wide = config.model.hidden_size * axis.width, _bytes(config)[1]
    if first:
        yield axis.reduce("embedding", axis.rows, width)
        yield from axis.gather("embedding gradient", axis.rows, width)
    own, columns = axis.rows // axis.parts, padded_vocab(config.model, tp) // tp
    for rows in pieces_of(own, loss_chunks(own, axis.rows * axis.batch, columns)) if last else []:
        whole = (rows.stop - rows.start) * axis.parts
        yield from axis.gather("head", whole, width, under=True)
        yield Sent("tp", "all_reduce", whole * axis.batch * wide, "loss peak")
        yield Sent("tp", "all_reduce", 2 * whole * axis.batch * wide, "loss sums")
        yield axis.reduce("head gradient", whole, width)


def _tensor_parallel(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """List what the units of a rank's chunks send over tp, and what it gathers of boundaries that it receives."""
    p, m = config.parallel, config.micro_batches
    layout, fp8 = stages_of(config), eight_bit_layers(config)
    for chunk in range(p.vpp if p.tp > 1 else 0):
        index, recompute = layout.index(coord.pp, chunk), recompute_of(config.train, chunk)
        first, last = index == 0, index == layout.count - 1
        blocks = Counter((block(config.model, layer), layer in fp8) for layer in layout.layers(index))
        for kind, count in blocks.items():
            yield from (each._replace(times=count * each.times) for each in block_traffic(config, *kind, recompute))
        yield from (each._replace(times=m) for each in _ends(config, first, last))
        for _ in range(0 if p.sp else (not first) + (not last)):  # of each a rank receives a part
            yield Sent("tp", "all_gather", message_bytes(config) * p.tp, "boundary", times=m)


def _messages(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """List the messages between stages. Those to a later rank of the pipeline go up, those to an earlier one down."""
    layout, size = stages_of(config), message_bytes(config)
    for chunk, step in itertools.product(range(layout.vpp), (-1, 1)):
        other = layout.index(coord.pp, chunk) + step
        if layout.pp > 1 and 0 <= other < layout.count:
            way, back = ("pp.up", "pp.down") if other % layout.pp > coord.pp else ("pp.down", "pp.up")
            yield Sent(way, "send", size, "boundary", times=config.micro_batches)
            yield Sent(back, "receive", size, "boundary", times=config.micro_batches)


def _gradients(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """List the collectives of each bucket: over data parallelism, of what every tp rank holds whole, and of a shared
    embedding.
    """
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
        if _shared(config) and [slot.parameter.name for slot in bucket.slots] == [TOKEN_EMBEDDING]:
            yield Sent("tied", "all_reduce", wide * (high - low), "embedding")


def _optimizer(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """List the sums of squared norms of weights and of directions, where the update is scaled by them."""
    p, norms = config.parallel, OPTIMIZERS[config.optimizer.name].facts["needs"] == "norms"
    matrices = sum(slot.parameter.is_matrix for bucket in _buckets(config, coord.pp) for slot in bucket.slots)
    if norms and p.tp > 1:
        yield Sent("tp", "all_reduce", 2 * FP64 * matrices, "parameter norms")
    if norms and p.zero and replicas(config) > 1:
        yield Sent("dp", "all_reduce", 2 * FP64 * matrices, "parameter norms")
    if norms and _shared(config) and coord.pp in (0, p.pp - 1):
        yield Sent("tied", "all_reduce", 2 * FP64, "parameter norms")


def _totals(config: RunConfig, coord: Coord) -> Iterator[Sent]:
    """List the sums of the whole job, in a large one over one axis after the other."""
    layers = eight_bit_layers(config) if RECIPES[config.fp8.recipe].facts["scale"] == "history" else []
    magnitudes = FP32 * sum(len(list(operands(block(config.model, layer)))) for layer in layers)
    axes = {"world.dp": replicas(config), "world.tp": config.parallel.tp, "world.pp": config.parallel.pp}
    groups = {"world": config.world} if config.world <= AT_ONCE else axes
    for number, (group, size) in enumerate(groups.items()):
        if size > 1 and magnitudes:
            yield Sent(group, "all_reduce", magnitudes, "fp8 magnitudes")
        if size > 1:
            operation, parts = ("all_gather", size) if number else ("all_reduce", 1)
            yield Sent(group, operation, FP64 * TOTALS * parts, "totals")


def _buckets(config: RunConfig, pp_rank: int) -> list[Bucket]:
    """Pack the buckets of a pipeline rank as they are reduced and gathered; sizes are in elements."""
    topology = topology_of(config)
    return [pack(bucket, topology) for chunk in chunk_buckets(config, pp_rank) for bucket in chunk]


def _shared(config: RunConfig) -> bool:
    """Tell whether the two ends of the pipeline share the token embedding."""
    return config.model.tie_embeddings and config.parallel.pp > 1


def _bytes(config: RunConfig) -> tuple[int, int]:
    """Bytes of an element in the compute and in the accumulation dtype."""
    facts = PRECISIONS[config.train.precision].facts
    return facts["compute_bytes"], facts["accumulate_bytes"]
