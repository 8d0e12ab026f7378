"""Tensor parallelism: linear layers whose weights are cut over the ranks of a group (Shoeybi et al. 2019), and with
sequence parallelism activations cut along the sequence between them (Korthikanti et al. 2022).

Activations are [s, b, h], so a cut along the sequence is contiguous. Column-parallel layers need their whole input on
every rank, row-parallel layers leave a sum over ranks: without sequence parallelism that is an all-reduce in the
backward of the first and one in the forward of the second; with it an all-gather and a reduce-scatter in the forward
and their opposites in the backward, and the gathered input is not kept but gathered again for the weight's gradient
(but for the head's, whose backward follows at once, beside logits that are far larger).
Layers side by side share their collectives. All of them travel under matrix products (`parallel.overlap`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.comm.pending import DONE
from megascale.parallel.overlap import Layer, TensorAxis, gathered_products, reduced_product
from megascale.parallel.weights import add_product, add_sum


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis, what: str = "", *, keep: bool = False
) -> Tensor:
    """x [s, b, k] W^T + b with the rows of W cut: weight [n / tp, k], bias [n / tp], result [s, b, n / tp].

    With sequence parallelism x is [s / tp, b, k]; `keep` the gathered one for the backward, where that comes at once.
    `what` names it in the ledger.
    """
    return column_linears(x, [(weight, bias)], axis, what, keep=keep)[0]


def column_linears(
    x: Tensor, layers: Sequence[Layer], axis: TensorAxis, what: str = "", *, keep: bool = False
) -> tuple[Tensor, ...]:
    """`column_linear` of one input through several layers, which share one gather of it and one sum of its gradient."""
    return _Columns.apply(axis, what, keep, x, *(tensor for layer in layers for tensor in layer))


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis, what: str = "") -> Tensor:
    """x [s, b, k / tp] W^T + b with the columns of W cut: weight [n, k / tp], bias [n] whole, result [s, b, n].

    With sequence parallelism the result is [s / tp, b, n].
    """
    return row_linears([x], [(weight, bias)], axis, what)


def row_linears(inputs: Sequence[Tensor], layers: Sequence[Layer], axis: TensorAxis, what: str = "") -> Tensor:
    """The sum of `row_linear` of several inputs, each through its layer, in one sum over ranks."""
    return _Rows.apply(axis, what, len(inputs), *inputs, *(tensor for layer in layers for tensor in layer))


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: TensorAxis, what: str, keep: bool, x: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.axis, ctx.what, ctx.keep = axis, what, keep
        layers = list(zip(*_layers(tensors), strict=True))
        full, products = gathered_products(x, layers, axis, what)
        ctx.save_for_backward(full if keep else x, *tensors)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        axis: TensorAxis = ctx.axis
        weights, biases = _layers(tensors)
        grads = tuple(grad.contiguous() for grad in grads)
        full, gathering = (x, DONE) if ctx.keep else axis.gather(x, f"{ctx.what} again", wait=not axis.overlap)
        grad_x = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_x.view(-1, grad_x.shape[-1]).addmm_(_rows(grad), weight)
        grad_x, reducing = axis.reduce(grad_x, f"{ctx.what} gradient", wait=not axis.overlap)
        gathering.wait()
        found: list[Tensor | None] = []
        for grad, weight, bias in zip(grads, weights, biases, strict=True):
            found.append(add_product(weight, _rows(grad), _rows(full)))
            found.append(add_sum(bias, _rows(grad)) if bias is not None else None)
        reducing.wait()
        return None, None, None, grad_x, *found


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, what: str, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.axis, ctx.what, ctx.count = axis, what, count
        inputs, (weights, biases) = tensors[:count], _layers(tensors[count:])
        out = reduced_product(inputs, weights, axis, what)
        for bias in biases:
            if bias is not None:
                out += bias
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis: TensorAxis = ctx.axis
        inputs, (weights, biases) = ctx.saved_tensors[: ctx.count], _layers(ctx.saved_tensors[ctx.count :])
        part = grads[0].contiguous()
        sums: list[Tensor | None] = [None] * len(weights)

        def add(full: Tensor, rows: slice) -> None:
            for i, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
                product, before = add_product(weight, _rows(full[rows]), _rows(x[rows])), sums[i]
                sums[i] = product if product is None or before is None else before + product

        into: list[Layer] = [(weight.t(), None) for weight in weights]
        _, products = gathered_products(part, into, axis, f"{ctx.what} gradient", add)
        found: list[Tensor | None] = []
        for total, bias in zip(sums, biases, strict=True):
            found += [total, add_sum(bias, _rows(part)) if bias is not None else None]
        return None, None, None, *products, *found


def _layers(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases of layers that follow each other, a weight and a bias each."""
    return [tensor for tensor in tensors[0::2] if tensor is not None], list(tensors[1::2])


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
