"""Matrix products under which a collective travels (MegaScale 3.2, figure 3).

The product of a gathered input is formed for this rank's own rows at once, and for the others' piece by piece as they
arrive; a product that is to be summed over ranks is formed piece by piece, the other ranks' rows first, and each piece
leaves while the next is formed. The bytes are those of one collective. Where nothing travels while this rank computes,
as through shared memory, pieces would only cost: there the collective comes before or after the whole product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.comm import symmetric
from megascale.comm.collectives import (
    ReduceScatterPieces,
    all_gather,
    all_gather_pieces,
    all_reduce,
    pieces_of,
    reduce_scatter,
)
from megascale.comm.group import Group
from megascale.comm.pending import DONE, Awaitable

PIECES = 4
"""Most pieces of a collective: with p of them about 1/p of its time stays exposed."""

PIECE_BYTES = 1 << 17
"""Fewer bytes in a piece cost more in messages than they hide (docs/performance.md)."""


@dataclass(frozen=True)
class TensorAxis:
    """The tp group and how activations lie on it.

    `sequence`: they are cut along dimension 0 between the layers. `overlap`: communicate while matrix products run.
    `fused`: by symmetric memory.
    """

    group: Group
    sequence: bool = False
    overlap: bool = True
    fused: bool = False

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

    def gather(self, x: Tensor, what: str, *, wait: bool = True) -> tuple[Tensor, Awaitable]:
        """The whole of x [s / size, ...] along dimension 0; x itself if activations are not cut."""
        if not self.cut:
            return x, DONE
        full = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        return full, all_gather(self.group, full, x.contiguous(), what=what, wait=wait)

    def reduce(self, x: Tensor, what: str, *, wait: bool = True) -> tuple[Tensor, Awaitable]:
        """The sum of x over the ranks, cut along dimension 0 if activations are. May write over x."""
        if self.size == 1:
            return x, DONE
        if not self.sequence:
            return x, all_reduce(self.group, x, what=what, wait=wait)
        part = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        return part, reduce_scatter(self.group, part, x, what=what, wait=wait)

    def pieces(self, part: Tensor) -> int:
        """In how many pieces a rank's part of a collective travels; 0 if not piece by piece."""
        if not self.overlap or self.group.exchange is None:
            return 0
        return max(1, min(PIECES, part.nbytes // PIECE_BYTES))


def gathered_product(
    part: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis, what: str
) -> tuple[Tensor, Tensor]:
    """The whole of part [s / tp, b, k] (itself if activations are not cut), and its product with weight [n, k]
    transposed, plus bias [n].
    """
    if axis.cut and axis.overlap and axis.fused:
        full, product = symmetric.all_gather_matmul(axis.group, part.contiguous(), weight.t(), what=what)
        return full, product if bias is None else product.add_(bias)
    pieces = axis.pieces(part) if axis.cut else 0
    if not pieces:
        full, _ = axis.gather(part, what)
        return full, F.linear(full, weight, bias)
    full = part.new_empty(part.shape[0] * axis.size, *part.shape[1:])
    product = full.new_empty(*full.shape[:-1], weight.shape[0])
    for arrived, pending in all_gather_pieces(axis.group, full, part.contiguous(), pieces, what=what):
        pending.wait()
        for rows in arrived:
            _multiply(product[rows], full[rows], weight, bias)
    return full, product


def reduced_product(x: Tensor, weight: Tensor, term: Tensor | None, axis: TensorAxis, what: str) -> Tensor:
    """The sum over ranks of x [s, b, k] times weight [n, k] transposed, plus `term` [s, b, n] of each rank, which is
    overwritten: [s, b, n], or this rank's [s / tp, b, n] if activations are cut.
    """
    if axis.cut and axis.overlap and axis.fused and term is None:
        return symmetric.matmul_reduce_scatter(axis.group, x, weight.t(), what=what)
    full = x.new_empty(*x.shape[:-1], weight.shape[0]) if term is None else term
    part = full[: full.shape[0] // axis.size]
    pieces = axis.pieces(part if axis.sequence else full)
    if not pieces:
        _multiply(full, x, weight, add=term is not None)
        return axis.reduce(full, what)[0]
    if axis.sequence:
        out = torch.empty_like(part)
        leaving = ReduceScatterPieces(axis.group, out, full, pieces, what=what)
        for wave in leaving.waves:
            for rows in wave:
                _multiply(full[rows], x[rows], weight, add=term is not None)
            leaving.send()
        leaving.finish()
        return out
    pending = []
    runs = pieces_of(full.shape[0], pieces)
    for index, rows in enumerate(runs):
        _multiply(full[rows], x[rows], weight, add=term is not None)
        label = f"{what} {index + 1}/{len(runs)}" if len(runs) > 1 else what
        pending.append(all_reduce(axis.group, full[rows], what=label, wait=False))
    for reducing in pending:
        reducing.wait()
    return full


def _multiply(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, add: bool = False) -> None:
    """out [..., n] = x [..., k] times weight [n, k] transposed, plus bias, or plus what is there if `add`."""
    rows, result = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if add:
        result.addmm_(rows, weight.t())
    elif bias is None:
        torch.mm(rows, weight.t(), out=result)
    else:
        torch.addmm(bias, rows, weight.t(), out=result)
