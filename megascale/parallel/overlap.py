"""Matrix products under which a collective travels (MegaScale 3.2, figure 3).

The product of a gathered input is formed for this rank's own rows at once, and for the others' piece by piece as they
arrive; a product that is to be summed over ranks is formed piece by piece, the other ranks' rows first, and each piece
leaves while the next is formed. The bytes are those of one collective. Where pieces would only cost, the collective
comes before or after the whole product: where nothing travels while this rank computes, as through shared memory, and
on a GPU where the GEMMs of pieces would have too few rows (`layout.pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.comm import symmetric
from megascale.comm.collectives import (
    ReduceScatterPieces,
    all_gather,
    all_gather_pieces,
    all_reduce,
    labelled,
    reduce_scatter,
)
from megascale.comm.group import Group
from megascale.comm.pending import DONE, Awaitable
from megascale.core.label import Label
from megascale.layout.pieces import GPU_GROUP, GPU_ROWS, PIECE_BYTES, PIECES, most_pieces
from megascale.ops.fp8 import Grain, Quantized
from megascale.parallel.numerics import PLAIN, Factor, Numerics, Operand

SCALES_ALIGNED = 4
"""Scales in 16 bytes: those of the rows of a GEMM must begin at a multiple (cuBLAS)."""


class Layer(NamedTuple):
    """A weight [n, k], cut in one dimension, a bias [n], and in which numbers it multiplies."""

    weight: Tensor
    bias: Tensor | None = None
    numerics: Numerics = PLAIN


@dataclass(frozen=True)
class TensorAxis:
    """The tp group and how activations lie on it.

    `sequence`: they are cut along dimension 0 between the layers. `overlap`: communicate while matrix products run.
    `fused`: by symmetric memory. `gpu`: GEMMs need many rows.
    """

    group: Group
    sequence: bool = False
    overlap: bool = True
    fused: bool = False
    gpu: bool = False

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def index(self) -> int:
        return self.group.index

    @property
    def cut(self) -> bool:
        """Whether a rank has only a part of the activations between the layers."""
        return self.sequence and self.size > 1

    def gather(self, x: Tensor, what: Label, *, wait: bool = True) -> tuple[Tensor, Awaitable]:
        """The whole of x [s / size, ...] along dimension 0; x itself if activations are not cut."""
        if not self.cut:
            return x, DONE
        full = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        return full, all_gather(self.group, full, x.contiguous(), what=what, wait=wait)

    def reduce(self, x: Tensor, what: Label, *, wait: bool = True) -> tuple[Tensor, Awaitable]:
        """The sum of x over the ranks, cut along dimension 0 if activations are. May write over x."""
        if self.size == 1:
            return x, DONE
        if not self.sequence:
            return x, all_reduce(self.group, x, what=what, wait=wait)
        part = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        return part, reduce_scatter(self.group, part, x, what=what, wait=wait)

    def gather_operand(self, x: Operand, what: Label, *, wait: bool = True) -> tuple[Operand, Awaitable]:
        """`gather` of a factor: of one in eight bits its bytes, and first its scales if each row has its own."""
        if isinstance(x, Tensor) or not self.cut:
            return (x, DONE) if isinstance(x, Quantized) else self.gather(x, what, wait=wait)
        scale = self.gather_scale(x, what)
        data, gathering = self.gather(x.data.view(torch.uint8), what, wait=wait)
        return Quantized(data.view(x.data.dtype), scale, x.grain), gathering

    def gather_scale(self, x: Quantized, what: Label) -> Tensor:
        """The scales of the whole of x."""
        return x.scale if x.grain is Grain.TENSOR else self.gather(x.scale, what.then("scales"))[0]

    def by_symmetric_memory(self, inputs: Sequence[Operand], weights: Iterable[Operand], rows: int) -> bool:
        """Whether torch's fused operators carry out these products: of one input, with all factors as they are or all
        under scales of one grain, that of a tensor or of a row. `rows`: of the GEMM for each rank.
        """
        if not (self.fused and self.cut and self.overlap) or len(inputs) > 1 or rows < GPU_ROWS:
            return False
        grains = {factor.grain if isinstance(factor, Quantized) else None for factor in (*inputs, *weights)}
        if grains == {None}:
            return True
        aligned = rows % SCALES_ALIGNED == 0
        return symmetric.has_scaled() and (grains == {Grain.TENSOR} or (grains == {Grain.ROW} and aligned))

    def pieces(self, part: Operand) -> int:
        """In how many pieces a rank's part [s, b, k] of a collective travels; 0 if not piece by piece."""
        if not self.overlap or self.group.exchange is None:
            return 0
        pieces = max(1, min(PIECES, part.nbytes // PIECE_BYTES))
        if not self.gpu:
            return pieces
        if self.cut and self.size > GPU_GROUP:  # without a cut a piece is a collective of its own, not messages
            return 0
        return min(pieces, most_pieces(*part.shape[:2]))


def gathered_products(
    part: Operand,
    layers: Sequence[Factor],
    axis: TensorAxis,
    what: Label,
    dtype: torch.dtype,
    also: Callable[[Operand, slice], None] | None = None,
    arrived: Callable[[Operand], Operand] = lambda x: x,
) -> tuple[Operand, list[Tensor]]:
    """The whole of part [s / tp, b, k] (itself if activations are not cut), and its products with weights [n, k]
    transposed, plus biases [n], in `dtype`.

    `also` is called with the whole and rows of it that are there: all at once, or this rank's own while the others'
    travel, and later those. `arrived` makes a factor of what has travelled.
    """
    also = also or (lambda full, rows: None)
    pieces = axis.pieces(part) if axis.cut else 0
    weights = [layer.weight for layer in layers]
    if axis.by_symmetric_memory([part], weights, part.shape[:-1].numel()):
        full, products = _gathered_by_symmetric_memory(part, weights, axis, what, dtype)
        pairs = zip(products, layers, strict=True)
        products = [product if bias is None else product.add_(bias) for product, (_, bias, _) in pairs]
    elif not pieces:
        full, _ = axis.gather_operand(part, what)
        factor = arrived(full)
        products = [numerics.linear(factor, weight, bias, dtype) for weight, bias, numerics in layers]
    else:
        return _products_of_pieces(part, layers, axis, what, pieces, dtype, also, arrived)
    also(full, slice(0, full.shape[0]))
    return full, products


def _gathered_by_symmetric_memory(
    part: Operand, weights: Sequence[Operand], axis: TensorAxis, what: Label, dtype: torch.dtype
) -> tuple[Operand, list[Tensor]]:
    if isinstance(part, Tensor):
        matrices = [weight.t() for weight in weights if isinstance(weight, Tensor)]
        return symmetric.all_gather_matmul(axis.group, part.contiguous(), matrices, what=what)
    scale = axis.gather_scale(part, what)
    factors = [_transposed(weight) for weight in weights if isinstance(weight, Quantized)]
    data, products = symmetric.all_gather_scaled_matmul(axis.group, part.data, scale, factors, dtype, what=what)
    return Quantized(data, scale, part.grain), products


def _transposed(weight: Quantized) -> symmetric.ScaledMatrix:
    """A weight [n, k] as a second factor [k, n], with its scale, [] or for each column [1, n]."""
    return symmetric.ScaledMatrix(weight.data.t(), weight.scale.t(), weight.fast)


def _products_of_pieces(
    part: Operand,
    layers: Sequence[Factor],
    axis: TensorAxis,
    what: Label,
    pieces: int,
    dtype: torch.dtype,
    also: Callable[[Operand, slice], None],
    arrived: Callable[[Operand], Operand],
) -> tuple[Operand, list[Tensor]]:
    n = part.shape[0]
    sent = part.data.view(torch.uint8) if isinstance(part, Quantized) else part.contiguous()
    received = sent.new_empty(n * axis.size, *sent.shape[1:])
    full: Operand = received
    if isinstance(part, Quantized):
        full = Quantized(received.view(part.data.dtype), axis.gather_scale(part, what), part.grain)
    products = [received.new_empty(*full.shape[:-1], weight.shape[0], dtype=dtype) for weight, _, _ in layers]
    for number, (ready, pending) in enumerate(all_gather_pieces(axis.group, received, sent, pieces, what=what)):
        pending.wait()
        for rows in ready:
            factor = arrived(full[rows])
            for product, (weight, bias, numerics) in zip(products, layers, strict=True):
                numerics.multiply(product[rows], factor, weight, bias)
        if number == 0:  # this rank's own
            also(full, slice(n * axis.index, n * (axis.index + 1)))
    for rows in (slice(0, n * axis.index), slice(n * (axis.index + 1), n * axis.size)):
        if rows.start < rows.stop:
            also(full, rows)
    return full, products


def reduced_product(
    inputs: Sequence[Operand], layers: Sequence[Factor], axis: TensorAxis, what: Label, dtype: torch.dtype
) -> Tensor:
    """The sum, over ranks and over inputs [s, b, k], of input times its weight [n, k] transposed: [s, b, n], or this
    rank's [s / tp, b, n] if activations are cut, in `dtype`. Without biases: each rank would add them.
    """
    x, matrix = inputs[0], layers[0].weight
    if axis.by_symmetric_memory(inputs, [layer.weight for layer in layers], x.shape[:-1].numel() // axis.size):
        return _reduced_by_symmetric_memory(x, matrix, axis, what, dtype)
    full = x.new_empty(*x.shape[:-1], matrix.shape[0], dtype=dtype)

    def form(rows: slice) -> None:
        for number, (x, (weight, _, numerics)) in enumerate(zip(inputs, layers, strict=True)):
            numerics.multiply(full[rows], x[rows], weight, add=number > 0)

    part = full[: full.shape[0] // axis.size]
    pieces = axis.pieces(part if axis.sequence else full)
    if not pieces:
        form(slice(0, full.shape[0]))
        return axis.reduce(full, what)[0]
    if axis.sequence:
        out = torch.empty_like(part)
        leaving = ReduceScatterPieces(axis.group, out, full, pieces, what=what)
        for wave in leaving.waves:
            for rows in wave:
                form(rows)
            leaving.send()
        leaving.finish()
        return out
    pending = []
    for rows, label in labelled(full.shape[0], pieces, what):
        form(rows)
        pending.append(all_reduce(axis.group, full[rows], what=label, wait=False))
    for reducing in pending:
        reducing.wait()
    return full


def _reduced_by_symmetric_memory(
    x: Operand, weight: Operand, axis: TensorAxis, what: Label, dtype: torch.dtype
) -> Tensor:
    if isinstance(x, Tensor) and isinstance(weight, Tensor):
        return symmetric.matmul_reduce_scatter(axis.group, x, weight.t(), what=what)
    assert isinstance(x, Quantized) and isinstance(weight, Quantized), "both factors are in eight bits, or none"
    factor = _transposed(weight)
    return symmetric.scaled_matmul_reduce_scatter(axis.group, x.data, x.scale, factor, dtype, what=what)
