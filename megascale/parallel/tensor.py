"""Tensor parallelism: linear layers whose weights are sharded over the tp group (Shoeybi et al. 2019), and sequence
parallelism (sp), which shards the activations between them along the sequence (Korthikanti et al. 2022).

Weights are [n, k] as in torch, Y = X W^T + b; wgrad sums over all s * b tokens. sum_i: sum over the tp ranks i.

    column-parallel, rank i: row block W_i [n / tp, k], b_i [n / tp]           without sp    with sp
    forward  Y_i  = X W_i^T + b_i         [s, b, n / tp]                      -             all-gather of X first
    dgrad    dX   = sum_i dY_i W_i        [s, b, k]                           all-reduce    reduce-scatter
    wgrad    dW_i = dY_i^T X              [n / tp, k]                         -             all-gather of X first

    row-parallel, rank i: column block W_i [n, k / tp], b [n]                  without sp    with sp
    forward  Y    = sum_i X_i W_i^T + b   [s, b, n]                           all-reduce    reduce-scatter
    dgrad    dX_i = dY W_i                [s, b, k / tp]                      -             all-gather of dY first
    wgrad    dW_i = dY^T X_i              [n, k / tp]                         -             reuses the dY of dgrad

Activations are [s, b, h], which keeps sequence shards contiguous. With sp a column-parallel layer saves its shard of X
and all-gathers the shard a second time for wgrad. A layer can also recompute its input from a saved tensor
(`parallel.recompute`). In a split backward (`parallel.grad_accumulation`) wgrad waits for W, which all-gathers what it
needs of X and dY in the order of the layers. Overlap: the forward collectives and the all-gather of dY are split into
pieces that overlap the GEMMs of other pieces (`parallel.tp_overlap`); in a column-parallel backward the all-gather of X
overlaps dgrad, and the reduction of dX overlaps wgrad.

`column_parallel_steps` and `row_parallel_steps` apply layers that share their collectives, in the steps of
`parallel.domino`; `column_parallel_linear` applies one layer at once; `shared_by_heads` has no layer.
`LinearParams`: a layer's weight, bias and GEMMs. `TensorParallel`: the tp group and its communication settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megascale.comm.work import Work
from megascale.ops.quantized import Quantized
from megascale.parallel.domino import Edge, EnterLayers, LeaveLayers
from megascale.parallel.grad_accumulation import (
    WeightGradients,
    accumulate_bias_grad,
    detached,
    is_frozen,
    left_for_w,
)
from megascale.parallel.linear_gemms import Operand, WeightOperand, flatten_tokens
from megascale.parallel.recompute import Recomputation
from megascale.parallel.segments import Steps, finish
from megascale.parallel.tp_overlap import LinearParams, TensorParallel, all_gather_matmul, matmul_reduce_scatter
from megascale.record.label import Label, LabelLike


def column_parallel_linear(
    x: Tensor, layer: LinearParams, tp: TensorParallel, label: LabelLike = "",
    recompute_input: Recomputation | None = None,
) -> Tensor:  # fmt: skip
    """Compute Y_i = X W_i^T + b_i for weight [n / tp, k] and bias [n / tp]: result [s, b, n / tp].

    x is [s, b, k], or [s / tp, b, k] with sequence parallelism. `label` names the collectives in the event log.
    Saved for backward: x, or with `recompute_input` the tensor from which backward recomputes x. With per-tensor FP8
    scales the FP8 operand is always saved instead.
    """
    return finish(column_parallel_steps(x, [layer], tp, label, recompute_input))[0]


def column_parallel_steps(
    x: Tensor, layers: Sequence[LinearParams], tp: TensorParallel, label: LabelLike = "",
    recompute_input: Recomputation | None = None,
) -> Steps[tuple[Tensor, ...]]:  # fmt: skip
    """Apply several column-parallel layers to x with one all-gather of x and one reduction of its gradient."""
    label, edge = Label.from_part(label), Edge() if tp.domino else None
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    if edge is not None:
        x = EnterLayers.apply(x, edge, layers[0].gemms, tp, label)
        yield None
    return _ColumnParallel.apply(tp, label, layers, recompute_input, edge, x, *parameters)


def row_parallel_steps(
    inputs: Sequence[Tensor], layers: Sequence[LinearParams], tp: TensorParallel, label: LabelLike = "",
    recompute_inputs: Sequence[Recomputation | None] | None = None, compute_output: bool = True,
) -> Steps[Tensor]:  # fmt: skip
    """Compute Y = sum over i of X_i W_i^T, + b, of row-parallel layers together, with one reduction over the tp ranks:
    for inputs [s, b, k / tp], one per layer, weights [n, k / tp] and biases [n].

    The result is [s, b, n], or [s / tp, b, n] with sequence parallelism. Inputs are saved as in
    `column_parallel_linear`. Without `compute_output` the forward GEMMs are skipped, and the result is a zero
    placeholder that stays connected to autograd: recomputation in backward (`recompute_in_backward`) needs only the
    tensors that the layers save.
    """
    label, edge = Label.from_part(label), Edge() if tp.domino else None
    recompute_inputs = recompute_inputs or [None] * len(inputs)
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    if edge is not None:
        yield None
    out = _RowParallel.apply(tp, label, layers, recompute_inputs, compute_output, edge, *inputs, *parameters)
    if edge is None:
        return out
    yield None
    return LeaveLayers.apply(out, edge, layers[0].gemms, tp, label)


def shared_by_heads(x: Tensor, tp: TensorParallel, label: LabelLike = "") -> Tensor:
    """Return x [s, b, k] of all tokens, for the heads of every tp rank; all-gathered from [s / tp, b, k] with sequence
    parallelism. The gradient is summed over the ranks, as that of a column-parallel layer's input.
    """
    return _SharedByHeads.apply(x, tp, Label.from_part(label)) if tp.size > 1 else x


class _SharedByHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, label: Label) -> Tensor:
        ctx.tp, ctx.label = tp, label
        return tp.gather(x, label)[0] if tp.activations_sharded else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)  # which the reduction overwrites
        return ctx.tp.reduce(grad, ctx.label.for_backward("gradient"))[0], None, None


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tp: TensorParallel, label: Label, layers: Sequence[LinearParams],
        recompute_input: Recomputation | None, edge: Edge | None, x: Tensor, *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.tp, ctx.label, ctx.layers, ctx.edge = tp, label, layers, edge
        first = layers[0].gemms  # all layers quantize x alike: once is enough
        operand, gathering = edge.take_gathering() if edge else (first.input_operand(x), None)
        weights = [WeightOperand(gemms.weight_for_forward(weight), bias, gemms) for weight, bias, gemms in layers]
        _, outputs = all_gather_matmul(operand, weights, tp, label, x.dtype, gathering=gathering)
        _save_for_wgrad(ctx, [first.saved_input(x, operand)], [recompute_input])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (restore_input,), trained, left = _saved_sources(ctx)
        tp: TensorParallel = ctx.tp
        layers: Sequence[LinearParams] = ctx.layers
        label, first = ctx.label, layers[0].gemms
        param_grads: list[Tensor | None] = [None] * (2 * len(layers))
        grads = tuple(grad.contiguous() for grad in grads)
        # Quantized before the all-gather starts: quantization may all-reduce an amax, which would queue behind the
        # all-gather on the same communicator.
        grad_operands = [layer.gemms.grad_operand(grad) for layer, grad in zip(layers, grads, strict=True)]

        add_bias_grads = partial(_add_bias_grads, layers, grads, param_grads)

        def start_wgrad() -> Callable[[], None]:
            x = restore_input()  # before the all-gather of x: a recomputation of x does not overlap a collective
            # Without sp, full_x is x.
            full_x, gathering = tp.gather_operand(x, label.for_backward("wgrad input"), wait=not tp.overlap)

            def finish() -> None:
                gathering.wait()
                x_operand = first.operand_for_wgrad("input", full_x)
                for i, (weight, _, gemms) in trained:
                    source = gemms.wgrad_source(grads[i], grad_operands[i])
                    grad_operand = gemms.operand_for_wgrad("gradient", source)
                    param_grads[2 * i] = gemms.accumulate_wgrad(weight, grad_operand, x_operand)
                add_bias_grads()

            return finish

        start = start_wgrad if trained else lambda: add_bias_grads
        finish_wgrad = start() if left is None else partial(left.add_started, start)
        # dgrad, while x is all-gathered
        grad_x = first.gemm(grad_operands[0], first.weight_for_dgrad(layers[0].weight), None, grads[0].dtype)
        for (weight, _, gemms), grad_operand in zip(layers[1:], grad_operands[1:], strict=True):
            gemms.gemm_out(grad_x, grad_operand, gemms.weight_for_dgrad(weight), add=True)
        # All-reduce, or reduce-scatter with sp.
        grad_x, reducing = tp.reduce(grad_x, label.for_backward("gradient"), wait=not tp.overlap)
        finish_wgrad()  # while grad_x is reduced
        if ctx.edge is None:
            reducing.wait()
        else:
            ctx.edge.reducing = reducing.wait
        return None, None, None, None, None, grad_x, *param_grads


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tp: TensorParallel, label: Label, layers: Sequence[LinearParams],
        recompute_inputs: Sequence[Recomputation | None], compute_output: bool, edge: Edge | None, *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.tp, ctx.label, ctx.layers, ctx.edge = tp, label, layers, edge
        inputs, operands, sources = tensors[: len(layers)], list[Operand](), list[Operand]()
        for layer, x in zip(layers, inputs, strict=True):
            operands.append(layer.gemms.input_operand(x))
            sources.append(layer.gemms.saved_input(x, operands[-1]))
        _save_for_wgrad(ctx, sources, recompute_inputs)
        if not compute_output:
            seq, batch, _ = inputs[0].shape
            seq //= tp.size if tp.activations_sharded else 1
            return inputs[0].new_zeros(()).expand(seq, batch, layers[0].weight.shape[0])
        weights = [WeightOperand(gemms.weight_for_forward(weight), None, gemms) for weight, _, gemms in layers]
        out, reducing = matmul_reduce_scatter(operands, weights, tp, label, inputs[0].dtype, wait=edge is None)

        def end_reduction() -> None:
            reducing.wait()
            for _, bias, _ in layers:  # added once, after the reduction
                if bias is not None:
                    out.add_(bias)

        if edge is None:
            end_reduction()
        else:
            edge.reducing = end_reduction
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layers: Sequence[LinearParams] = ctx.layers
        restore_inputs, trained, left = _saved_sources(ctx)
        grad, inputs = grads[0].contiguous(), list[Operand]()
        param_grads: list[Tensor | None] = [None] * (2 * len(layers))
        first = layers[0].gemms  # all layers have the same output gradient
        tp: TensorParallel = replace(ctx.tp, overlap=ctx.tp.overlap and first.grad_in_pieces)

        def accumulate_wgrads(full_grad: Operand, rows: slice) -> None:
            if not inputs:  # restored at the first call: for a wgrad in pieces, during the all-gather
                inputs.extend(restore() for restore in restore_inputs)
            is_full = rows == slice(0, full_grad.shape[0])
            grad_operand = first.operand_for_wgrad("gradient", full_grad if is_full else full_grad[rows])
            for i, (weight, _, gemms) in trained:
                x_operand = gemms.operand_for_wgrad("input", inputs[i] if is_full else inputs[i][rows])
                wgrad, total = gemms.accumulate_wgrad(weight, grad_operand, x_operand), param_grads[2 * i]
                if wgrad is not None:  # None: accumulated in main_grad
                    param_grads[2 * i] = wgrad if total is None else total + wgrad

        dgrad_weights = [WeightOperand(gemms.weight_for_dgrad(weight), None, gemms) for weight, _, gemms in layers]
        # Called by `all_gather_matmul` for rows of dY that are complete: this rank's rows first, or all rows at once.
        on_rows = accumulate_wgrads if first.wgrad_in_pieces and trained else None
        label, dtype = ctx.label.for_backward("gradient"), grad.dtype
        grad_shard, gathering = ctx.edge.take_gathering() if ctx.edge else (first.before_all_gather(grad), None)
        gather_matmul = partial(
            all_gather_matmul, grad_shard, tp=tp, dtype=dtype, after_all_gather=first.after_all_gather
        )

        # With sp a bias's gradient covers this rank's tokens; `Bucket.reduce_partial_grads` sums over tp.
        add_bias_grads = partial(_add_bias_grads, layers, [grad] * len(layers), param_grads)

        def dgrad_and_wgrad(
            weights: Sequence[WeightOperand], label: Label, gathering: tuple[Operand, Work] | None = None
        ) -> list[Tensor]:
            full_grad, input_grads = gather_matmul(weights, label=label, on_rows=on_rows, gathering=gathering)
            if on_rows is None and trained:
                accumulate_wgrads(full_grad, slice(0, full_grad.shape[0]))
            add_bias_grads()
            return input_grads

        if left is None:
            input_grads = dgrad_and_wgrad(dgrad_weights, label, gathering)
        else:
            _, input_grads = gather_matmul(dgrad_weights, label=label, gathering=gathering)
            work = partial(dgrad_and_wgrad, [], ctx.label.for_backward("wgrad gradient"))
            left.add(work if trained else add_bias_grads)
        return None, None, None, None, None, None, *input_grads, *param_grads


def _add_bias_grads(layers: Sequence[LinearParams], grads: Sequence[Tensor], param_grads: list[Tensor | None]) -> None:
    for i, (layer, grad) in enumerate(zip(layers, grads, strict=True)):
        if layer.bias is not None:
            param_grads[2 * i + 1] = accumulate_bias_grad(layer.bias, flatten_tokens(grad))


def _save_for_wgrad(ctx: Any, sources: Sequence[Operand], recompute_inputs: Sequence[Recomputation | None]) -> None:
    """Save the inputs' wgrad sources (`LinearGemms.saved_input`) for backward.

    For a source with a `Recomputation`, the tensor from which backward recomputes the source is saved instead.
    Quantized sources are always saved: recomputation would include another cast.
    """
    saved: list[Tensor] = []
    ctx.restore = []  # number of tensors, and the function from them to a source
    for x, recompute in zip(sources, recompute_inputs, strict=True):
        if isinstance(x, Quantized):
            saved += x.tensors
            ctx.restore.append((len(x.tensors), x.constructor()))
        else:
            saved.append(x if recompute is None else recompute.x)
            ctx.restore.append((1, (lambda x: x) if recompute is None else recompute.function))
    ctx.save_for_backward(*saved)


def _saved_sources(
    ctx: Any,
) -> tuple[list[Callable[[], Operand]], list[tuple[int, LinearParams]], WeightGradients | None]:
    """Return a function per source that restores or recomputes the source, the layers with a wgrad and their numbers,
    and the queue for the work on gradients of parameters in an I (`left_for_w`), for which sources are `detached`.
    """
    trained = [(i, layer) for i, layer in enumerate(ctx.layers) if not is_frozen(layer.weight)]
    left = left_for_w(*(each for layer in ctx.layers for each in (layer.weight, layer.bias) if each is not None))
    saved = iter(ctx.saved_tensors if left is None else detached(ctx.saved_tensors))
    return [partial(function, *islice(saved, count)) for count, function in ctx.restore], trained, left
