"""What tensor parallelism sends of each part of the network, for one micro-batch on one rank.

With W = s b h B bytes of an activation of a micro-batch, a column-parallel layer gathers W before its product with
sequence parallelism, gathers it again for the weight's gradient and scatters the sum of its gradient; a row-parallel
layer scatters a sum and gathers its gradient. Without it all-reduces of W stand in the place of the scatters, and
nothing is gathered (Korthikanti et al. 2022, 4.2). In eight bits what is gathered is smaller, and the largest
magnitudes of what ranks have parts of are exchanged. Names and order are those of the ledger (`parallel.tensor`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megascale.catalog.layers import BLOCKS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.layout.chunks import eight_bit_layers
from megascale.layout.loss import loss_chunks
from megascale.layout.pieces import PIECE_BYTES, PIECES, pieces_of
from megascale.layout.recompute import NOTHING, Recompute
from megascale.layout.tensors import padded_vocab

FP32 = 4
"""Bytes of a scale or of a largest magnitude."""

SCALE_BLOCK = 128
"""Numbers of a row that share a scale where the grain is a block (`ops.fp8`)."""


@dataclass(frozen=True)
class Collective:
    """`bytes`: of the whole tensor concerned. It travels in `calls` pieces, under the product that forms the tensor or
    needs it if `under` is true. `what`: its name in the ledger, without the layer.
    """

    operation: str
    bytes: int
    what: str
    calls: int = 1
    under: bool = False


@dataclass(frozen=True)
class TensorTraffic:
    """What a part of the network sends in the forward and the backward of a micro-batch, in this order; and `once`, in
    the first forward of a step, when weights are cast.
    """

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    once: tuple[Collective, ...] = ()


def layer_traffic(config: RunConfig, layer: int, recompute: Recompute = NOTHING) -> TensorTraffic:
    """Of a block of a resolved configuration, in a chunk that recomputes so."""
    return _Layer(config, layer).traffic(recompute)


def embedding_traffic(config: RunConfig) -> TensorTraffic:
    """Of the token embedding, of which each rank has the rows of some tokens."""
    axis, hidden = _Axis.of(config), config.model.hidden_size
    size = config.model.seq_length, hidden * axis.compute
    return TensorTraffic((*axis.reduce("embedding", *size),), (*axis.gather("embedding gradient", *size),))


def head_traffic(config: RunConfig) -> TensorTraffic:
    """Of the head and the loss, chunk by chunk: its forward has what other layers do in their backward."""
    axis, m = _Axis.of(config), config.model
    parts = axis.size if axis.cut else 1
    own, columns = m.seq_length // parts, padded_vocab(m, axis.size) // axis.size
    chunks = pieces_of(own, loss_chunks(own, m.seq_length * axis.batch, columns))
    sent: list[Collective] = []
    for number, rows in enumerate(chunks):
        what = f"head {number + 1}/{len(chunks)}" if len(chunks) > 1 else "head"
        whole, width = (rows.stop - rows.start) * parts, m.hidden_size * axis.compute
        sent += axis.gather(what, whole, width, under=True)
        sent += axis.sum("loss peak", whole * axis.batch * axis.wide)
        sent += axis.sum("loss sums", 2 * whole * axis.batch * axis.wide)
        sent += axis.reduce(f"{what} gradient", whole, width)
    return TensorTraffic(tuple(sent))


@dataclass(frozen=True)
class _Axis:
    """The tp group and how activations lie on it. `batch`: sequences of a micro-batch; `compute`, `wide`: bytes of an
    activation and of a loss.
    """

    size: int
    cut: bool
    overlap: bool
    batch: int
    compute: int
    wide: int

    @classmethod
    def of(cls, config: RunConfig) -> _Axis:
        p, facts = config.parallel, PRECISIONS[config.train.precision].facts
        compute, wide = facts["compute_bytes"], facts["accumulate_bytes"]
        return cls(p.tp, p.sp and p.tp > 1, config.overlap.tp, config.batch.micro, compute, wide)

    def gather(self, what: str, rows: int, width: int, *, under: bool = False) -> Iterator[Collective]:
        """Of the whole of what is cut along the sequence: `rows` positions of `width` bytes."""
        if self.cut:
            yield self._travelling("all_gather", what, rows, width, self.size, under)

    def reduce(self, what: str, rows: int, width: int, *, under: bool = False) -> Iterator[Collective]:
        """Of a sum over ranks, of which each keeps a part where activations are cut."""
        if self.cut:
            yield self._travelling("reduce_scatter", what, rows, width, self.size, under)
        elif self.size > 1:
            yield self._travelling("all_reduce", what, rows, width, 1, under)

    def sum(self, what: str, nbytes: int) -> Iterator[Collective]:
        """Of few numbers, or of their maximum."""
        if self.size > 1:
            yield Collective("all_reduce", nbytes, what)

    def _travelling(self, operation: str, what: str, rows: int, width: int, parts: int, under: bool) -> Collective:
        """`parts` that travel at once."""
        nbytes = rows * self.batch * width
        under = under and self.overlap
        pieces = max(1, min(PIECES, nbytes // parts // PIECE_BYTES)) if under else 1
        return Collective(operation, nbytes, what, min(pieces, rows // parts), under)


class _Layer:
    """The linear layers of a block, and in which numbers they multiply. `grain`: of what is cast to eight bits, None
    where nothing is; `current`: whether scales come from what is cast.
    """

    def __init__(self, config: RunConfig, layer: int) -> None:
        facts = RECIPES[config.fp8.recipe].facts
        self.axis, self.model = _Axis.of(config), config.model
        self.grain = facts["grain"] if layer in eight_bit_layers(config) else None
        self.current = facts["scale"] == "current"

    def traffic(self, recompute: Recompute) -> TensorTraffic:
        up = "mlp.gate_up" if self.model.gated else "mlp.up"
        columns, rows = [("attention.qkv", "qkv"), (up, "up")], [("attention.out", "out"), ("mlp.down", "down")]
        if BLOCKS[self.model.block].facts["norms"] == 1:  # layers side by side share their collectives
            order = [(columns, "qkv and up"), (rows, "out and down")]
        else:
            order = [([each], each[1]) for pair in zip(columns, rows, strict=True) for each in pair]
        groups = [([name for name, _ in layers], what, layers[0] in columns) for layers, what in order]
        forward = [self._forward(*group) for group in groups]
        backward = [self._backward(*group) for group in reversed(groups)]
        if recompute.full:  # all but the last sum, which nothing needs
            last = [each for each in forward[-1] if "magnitude" in each.what]
            backward = [*forward[:-1], last, *backward]
        once = [sent for names, _, _ in groups for name in names for sent in self._weight(name)]
        return TensorTraffic(
            tuple(sent for each in forward for sent in each),
            tuple(sent for each in backward for sent in each),
            tuple(once),
        )

    def _forward(self, names: Sequence[str], what: str, column: bool) -> list[Collective]:
        axis, rows, hidden = self.axis, self.model.seq_length, self.model.hidden_size
        if not column:
            casts = [sent for name in names for sent in self._cast(f"{name}.input", cut=True, cut_last=True)]
            return [*casts, *axis.reduce(what, rows, hidden * axis.compute, under=True)]
        scales = {"row": 1, "block": hidden // SCALE_BLOCK}.get(self.grain or "", 0)
        return [
            *self._cast(f"{names[0]}.input", cut=axis.cut, cut_last=False),
            *(axis.gather(f"{what} scales", rows, scales * FP32) if scales else ()),
            *axis.gather(what, rows, hidden * (1 if self.grain else axis.compute), under=True),
        ]

    def _backward(self, names: Sequence[str], what: str, column: bool) -> list[Collective]:
        axis, rows, hidden = self.axis, self.model.seq_length, self.model.hidden_size
        width = hidden * (1 if self.grain == "tensor" else axis.compute)  # of others a factor is cast once it is here
        if not column:
            cast = self._cast(f"{names[0]}.gradient", cut=axis.cut, cut_last=False) if self.grain == "tensor" else ()
            return [*cast, *axis.gather(f"{what} gradient", rows, width, under=True)]
        return [
            *(sent for name in names for sent in self._cast(f"{name}.gradient", cut=True, cut_last=True)),
            *axis.gather(f"{what} again", rows, width),
            *axis.reduce(f"{what} gradient", rows, hidden * axis.compute),
        ]

    def _cast(self, name: str, *, cut: bool, cut_last: bool) -> Iterator[Collective]:
        """Of an operand with tokens, of which ranks have parts (`cut`), or parts of each row (`cut_last`)."""
        tokens = self.model.seq_length * self.axis.batch
        yield from self._magnitudes(name, 1 if cut else 0, tokens if cut_last else 0)

    def _weight(self, name: str) -> Iterator[Collective]:
        """Of each weight one direction has rows that are cut, of which there are `hidden_size`."""
        yield from self._magnitudes(f"{name}.weight", 1, self.model.hidden_size)

    def _magnitudes(self, name: str, of_tensor: int, of_rows: int) -> Iterator[Collective]:
        """How many magnitudes ranks have to exchange where a tensor, or a row, has one scale."""
        numbers = {"tensor": of_tensor, "row": of_rows}.get(self.grain or "", 0)
        if self.current and numbers:
            yield from self.axis.sum(f"{name} magnitude", numbers * FP32)
