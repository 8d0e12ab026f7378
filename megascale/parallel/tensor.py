"""Tensor parallelism: linear layers whose weights are cut over the ranks of a group (Shoeybi et al. 2019), and with
sequence parallelism activations cut along the sequence between them (Korthikanti et al. 2022).

Activations are [s, b, h], so a cut along the sequence is contiguous. A column-parallel layer needs its whole input on
every rank, a row-parallel layer leaves a sum over ranks: without sequence parallelism that is an all-reduce in the
backward of the first and one in the forward of the second; with it an all-gather and a reduce-scatter in the forward
and their opposites in the backward, and the gathered input is not kept but gathered again for the weight's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.comm.collectives import all_gather, all_reduce, reduce_scatter
from megascale.comm.group import Group
from megascale.comm.pending import DONE, Pending
from megascale.parallel.weights import add_product, add_sum


@dataclass(frozen=True)
class TensorAxis:
    """The tp group and how activations lie on it. `sequence`: cut along dimension 0 between the layers. `overlap`: in
    the backward, communicate the input's gradient while the weight's is computed.
    """

    group: Group
    sequence: bool = False
    overlap: bool = True

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def index(self) -> int:
        return self.group.index

    def gather(self, x: Tensor, *, wait: bool = True) -> tuple[Tensor, Pending]:
        """The whole of x [s / size, ...] along dimension 0; x itself if activations are not cut."""
        if not self.sequence or self.size == 1:
            return x, DONE
        full = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        return full, all_gather(self.group, full, x.contiguous(), wait=wait)

    def reduce(self, x: Tensor, *, wait: bool = True) -> tuple[Tensor, Pending]:
        """The sum of x over the ranks, cut along dimension 0 if activations are. May write over x."""
        if self.size == 1:
            return x, DONE
        if not self.sequence:
            return x, all_reduce(self.group, x, wait=wait)
        part = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        return part, reduce_scatter(self.group, part, x, wait=wait)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis) -> Tensor:
    """x [s, b, k] W^T + b with the rows of W cut: weight [n / tp, k], bias [n / tp], result [s, b, n / tp].

    With sequence parallelism x is [s / tp, b, k].
    """
    return _ColumnLinear.apply(x, weight, bias, axis)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis) -> Tensor:
    """x [s, b, k / tp] W^T + b with the columns of W cut: weight [n, k / tp], bias [n] whole, result [s, b, n].

    With sequence parallelism the result is [s / tp, b, n].
    """
    return _RowLinear.apply(x, weight, bias, axis)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.axis = axis
        full, _ = axis.gather(x)
        return F.linear(full, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        axis: TensorAxis = ctx.axis
        grad = grads[0].contiguous()
        full, gathering = axis.gather(x, wait=not axis.overlap)
        grad_x, reducing = axis.reduce(grad @ weight, wait=not axis.overlap)
        gathering.wait()
        rows = grad.view(-1, grad.shape[-1])
        grad_weight = add_product(weight, rows, full.view(-1, full.shape[-1]))
        grad_bias = add_sum(bias, rows) if bias is not None else None
        reducing.wait()
        return grad_x, grad_weight, grad_bias, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.axis = axis
        if axis.size == 1:
            return F.linear(x, weight, bias)
        out, _ = axis.reduce(F.linear(x, weight))
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        axis: TensorAxis = ctx.axis
        part = grads[0].contiguous()
        grad, _ = axis.gather(part)
        grad_x = grad @ weight
        rows = grad.view(-1, grad.shape[-1])
        grad_weight = add_product(weight, rows, x.reshape(-1, x.shape[-1]))
        grad_bias = add_sum(bias, part.view(-1, part.shape[-1])) if bias is not None else None
        return grad_x, grad_weight, grad_bias, None
