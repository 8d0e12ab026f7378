"""Tensor parallelism: linear layers whose weights are cut over the ranks of a group (Shoeybi et al. 2019), and with
sequence parallelism activations cut along the sequence between them (Korthikanti et al. 2022).

Activations are [s, b, h], so a cut along the sequence is contiguous. Column-parallel layers need their whole input on
every rank, row-parallel layers leave a sum over ranks: without sequence parallelism that is an all-reduce in the
backward of the first and one in the forward of the second; with it an all-gather and a reduce-scatter in the forward
and their opposites in the backward, and the gathered input is not kept but gathered again for the weight's gradient.
What a layer's input was formed from may be kept instead of it (`parallel.recompute`).
Layers side by side share their collectives. All of them travel under matrix products (`parallel.overlap`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megascale.core.label import Label, What
from megascale.ops.fp8 import Quantized
from megascale.parallel.numerics import Factor, Numerics, Operand, rows_of
from megascale.parallel.overlap import Layer, TensorAxis, gathered_products, reduced_product
from megascale.parallel.recompute import Again
from megascale.parallel.weights import add_sum


def column_linear(x: Tensor, layer: Layer, axis: TensorAxis, what: What = "", again: Again | None = None) -> Tensor:
    """x [s, b, k] W^T + b with the rows of W cut: weight [n / tp, k], bias [n / tp], result [s, b, n / tp].

    With sequence parallelism x is [s / tp, b, k]. `what` names it in the ledger. x is kept for the backward, unless
    `again` forms it there; what is kept in eight bits is kept all the same.
    """
    return column_linears(x, [layer], axis, what, again)[0]


def column_linears(
    x: Tensor, layers: Sequence[Layer], axis: TensorAxis, what: What = "", again: Again | None = None
) -> tuple[Tensor, ...]:
    """`column_linear` of one input through several layers, which share one gather of it and one sum of its gradient."""
    numerics = [layer.numerics for layer in layers]
    return _Columns.apply(
        axis, Label.of(what), numerics, again, x, *(t for layer in layers for t in (layer.weight, layer.bias))
    )


def row_linear(
    x: Tensor, layer: Layer, axis: TensorAxis, what: What = "", again: Again | None = None, value: bool = True
) -> Tensor:
    """x [s, b, k / tp] W^T + b with the columns of W cut: weight [n, k / tp], bias [n] whole, result [s, b, n].

    With sequence parallelism the result is [s / tp, b, n]. x is kept for the backward as in `column_linear`.
    Without `value` nothing is computed: the result has the right shape and gradients, and no meaning.
    """
    return row_linears([x], [layer], axis, what, [again], value)


def row_linears(
    inputs: Sequence[Tensor], layers: Sequence[Layer], axis: TensorAxis, what: What = "",
    again: Sequence[Again | None] | None = None, value: bool = True,
) -> Tensor:  # fmt: skip
    """The sum of `row_linear` of several inputs, each through its layer, in one sum over ranks."""
    how = [layer.numerics for layer in layers], again or [None] * len(inputs), value
    return _Rows.apply(axis, Label.of(what), how, *inputs, *(t for layer in layers for t in (layer.weight, layer.bias)))


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        axis: TensorAxis,
        what: Label,
        numerics: Sequence[Numerics],
        again: Again | None,
        x: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.axis, ctx.what, ctx.numerics = axis, what, numerics
        weights, biases = _layers(tensors)
        operand = numerics[0].input(x)
        factors = [Factor(n.weight(w), bias, n) for n, w, bias in zip(numerics, weights, biases, strict=True)]
        _, products = gathered_products(operand, factors, axis, what, x.dtype)
        _keep(ctx, [numerics[0].kept(x, operand)], [again], tensors)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (form,), tensors = _kept(ctx)
        x = form()
        axis: TensorAxis = ctx.axis
        weights, biases = _layers(tensors)
        grads = tuple(grad.contiguous() for grad in grads)
        factors = [n.gradient(grad) for n, grad in zip(ctx.numerics, grads, strict=True)]  # may communicate: first
        full, gathering = axis.gather_operand(x, ctx.what.backward("again"), wait=not axis.overlap)
        into = [n.across(weight) for n, weight in zip(ctx.numerics, weights, strict=True)]
        grad_x = ctx.numerics[0].linear(factors[0], into[0], None, grads[0].dtype)
        for n, factor, matrix in zip(ctx.numerics[1:], factors[1:], into[1:], strict=True):
            n.multiply(grad_x, factor, matrix, add=True)
        grad_x, reducing = axis.reduce(grad_x, ctx.what.backward("gradient"), wait=not axis.overlap)
        gathering.wait()
        shared = ctx.numerics[0].along_tokens("input", full)
        found: list[Tensor | None] = []
        for n, factor, grad, weight, bias in zip(ctx.numerics, factors, grads, weights, biases, strict=True):
            found.append(n.add_gradient(weight, n.along_tokens("gradient", n.kept(grad, factor)), shared))
            found.append(add_sum(bias, rows_of(grad)) if bias is not None else None)
        reducing.wait()
        return None, None, None, None, grad_x, *found


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, what: Label, how: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        numerics, again, value = how
        ctx.axis, ctx.what, ctx.numerics = axis, what, numerics
        inputs, rest = tensors[: len(numerics)], tensors[len(numerics) :]
        weights, biases = _layers(rest)
        operands = [n.input(x) for n, x in zip(numerics, inputs, strict=True)]
        _keep(ctx, [n.kept(x, operand) for n, x, operand in zip(numerics, inputs, operands, strict=True)], again, rest)
        if not value:
            rows, batch, _ = inputs[0].shape
            return inputs[0].new_zeros(()).expand(rows // (axis.size if axis.cut else 1), batch, len(weights[0]))
        factors = [Factor(n.weight(weight), None, n) for n, weight in zip(numerics, weights, strict=True)]
        out = reduced_product(operands, factors, axis, what, inputs[0].dtype)
        for bias in biases:
            if bias is not None:
                out += bias
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis: TensorAxis = ctx.axis
        numerics: Sequence[Numerics] = ctx.numerics
        forms, tensors = _kept(ctx)
        weights, biases = _layers(tensors)
        part, inputs = grads[0].contiguous(), list[Operand]()
        sums: list[Tensor | None] = [None] * len(weights)
        first = numerics[0]  # the layers share one gradient

        def add(full: Operand, rows: slice) -> None:
            if not inputs:  # not before the gather has begun
                inputs.extend(form() for form in forms)
            whole = rows == slice(0, full.shape[0])
            shared = first.along_tokens("gradient", full if whole else full[rows])
            for i, (n, x, weight) in enumerate(zip(numerics, inputs, weights, strict=True)):
                own = n.along_tokens("input", x if whole else x[rows])
                product, before = n.add_gradient(weight, shared, own), sums[i]
                sums[i] = product if product is None or before is None else before + product

        into = [Factor(n.across(weight), None, n) for n, weight in zip(numerics, weights, strict=True)]
        also = add if first.piecewise else None
        travelling = first.travelling(part)
        full, products = gathered_products(
            travelling, into, axis, ctx.what.backward("gradient"), part.dtype, also, first.arrived
        )
        if also is None:
            add(full, slice(0, full.shape[0]))
        found: list[Tensor | None] = []
        for total, bias in zip(sums, biases, strict=True):
            found += [total, add_sum(bias, rows_of(part)) if bias is not None else None]
        return None, None, None, *products, *found


def _keep(
    ctx: Any, operands: Sequence[Operand], again: Sequence[Again | None], tensors: Sequence[Tensor | None]
) -> None:
    """Keep factors and tensors for the backward. Of what `again` forms is kept what it is formed from, unless it is in
    eight bits: forming that would mean to cast it again, too.
    """
    parts: list[Tensor | None] = []
    ctx.how = []
    for x, form in zip(operands, again, strict=True):
        if isinstance(x, Quantized):
            parts += [x.data, x.scale]
            ctx.how.append((partial(type(x), grain=x.grain), None))
        else:
            parts += [x if form is None else form.x, None]
            ctx.how.append((None, form and form.function))
    ctx.save_for_backward(*parts, *tensors)


def _kept(ctx: Any) -> tuple[list[Callable[[], Operand]], Sequence[Tensor | None]]:
    """How to have each factor, and the tensors."""
    saved, count = ctx.saved_tensors, 2 * len(ctx.how)
    each = enumerate(ctx.how)
    return [partial(_operand, saved[2 * i], saved[2 * i + 1], *how) for i, how in each], saved[count:]


def _operand(
    data: Tensor,
    scale: Tensor | None,
    quantized: Callable[..., Quantized] | None,
    form: Callable[[Tensor], Tensor] | None,
) -> Operand:
    if form is not None:
        return form(data)
    return data if quantized is None or scale is None else quantized(data, scale)


def _layers(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases of layers that follow each other, a weight and a bias each."""
    return [tensor for tensor in tensors[0::2] if tensor is not None], list(tensors[1::2])
