"""Cases of `ops.selftest`: the GEMMs of linear layers, weights' gradients, and optimizer steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.recipes import DITHERED
from megascale.config.train import OptimizerConfig
from megascale.layout.param_groups import ParamGroup
from megascale.ops.fp8 import ScaledWgrad
from megascale.ops.optimizer import Segment, UpdateInput, UpdateRule, is_function
from megascale.ops.quantized import Quantized
from megascale.ops.recipe import Dither, Quantizer, build_recipe
from megascale.ops.select import OpContext
from megascale.ops.selftest_layers import TOKENS, OperationCase, draw, wide_dtype

RATE = 0.1  # learning rate and weight decay
CLIP_COEFFICIENT = 0.25  # clipping coefficient given to element-wise rules


def _matrices(context: OpContext) -> list[Tensor]:
    """Draw matrices with growing rows and columns, to expose a misplaced scale."""
    k = context.model.hidden_size
    pair = draw((TOKENS, k), (2 * TOKENS, k))
    return [x * torch.linspace(1, 4, x.shape[0]).view(-1, 1) * torch.linspace(1, 4, k) for x in pair]


def _multiply(kernels: Any, context: OpContext, leaves: list[Tensor]) -> list[Tensor]:
    """Return the casts of a recipe's linear layers, with transposes, and under FP8 GEMMs: output and wgrad."""
    (x, weight), recipe = leaves, build_recipe(context.recipe or "tensorwise", kernels)
    of_input, of_weight, of_gradient = recipe.rows.values()

    def quantize(x: Tensor, quantizer: Quantizer) -> Quantized:
        rows, blocks = (torch.arange(size, device=x.device) for size in (x.shape[0], x.shape[1] // DITHERED))
        return quantizer.encode(x, with_transpose=True, dither=Dither((0, 0), rows, blocks))

    forward = quantize(x, of_input), quantize(weight, of_weight)
    backward = quantize(x, of_gradient), quantize(weight, of_input)
    both_ways = of_weight.spec.block.serves_transpose
    weight_t = forward[1].t() if both_ways else quantize(of_weight.turned(weight), of_weight)
    of_columns = recipe.columns["gradient"]
    x_t = quantize(of_columns.turned(x), of_columns)
    casts = [operand.dequantize() for operand in (*forward, *backward, weight_t, x_t)]
    if context.recipe is None:
        return casts
    if context.dtype == torch.float64:
        output, grad = (a.dequantize().double() @ b.dequantize().double().t() for a, b in (forward, backward))
        return [*casts, output, grad, 2 * grad]
    return [*casts, recipe.gemm(*forward, context.dtype), *_twice(recipe.wgrad, *backward)]


def _twice(wgrad: ScaledWgrad, a: Quantized, b: Quantized) -> list[Tensor]:
    """Return a weight's gradient after a micro-batch, which must overwrite NaN, and after another, equal one."""
    total = torch.full((a.shape[0], b.shape[0]), math.nan, dtype=torch.float32, device=a.data.device)
    wgrad(total, a, b, False)
    first = total.clone()
    wgrad(total, a, b, True)
    return [first, total]


def _accumulate(wgrad: Any, context: OpContext, leaves: list[Tensor]) -> list[Tensor]:
    """Accumulate two micro-batches of output gradients and inputs; the first must overwrite NaN."""
    grad, x = leaves
    total = torch.full((grad.shape[1], x.shape[1]), math.nan, dtype=wide_dtype(grad), device=x.device)
    wgrad(total, grad, x, False)
    first = total.clone()
    wgrad(total, 3 * grad, x, True)
    return [first, total]


def _weights(context: OpContext) -> list[Tensor]:
    """Draw weights and gradients of a matrix and of a bias."""
    h = context.model.hidden_size
    return draw((TOKENS * h,), (TOKENS * h,), (h,), (h,))


def _directions(rule: UpdateRule, context: OpContext, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the directions of two updates of a matrix, with the default options."""
    group, directions, state = ParamGroup(context.optimizer, weight_decay=0.0), [], dict[str, Tensor]()
    for name, shape in group.state_shapes(tuple(grad.shape)).items():
        state[name] = grad.new_zeros(shape, dtype=torch.uint8 if name in group.facts["uint8"] else grad.dtype)
    for step in (1, 2):
        first, options = step == 1, group.all_options
        direction, state = rule(UpdateInput(grad * step, state, step, options, weight, None, "weight", first, RATE))
        directions.append(direction)
    return directions


def _update(rule: Any, context: OpContext, leaves: list[Tensor]) -> list[Tensor]:
    """Return the weight changes and the state after two optimizer steps, in fp32 or wider; of a rule that is a function
    the directions of a matrix.
    """
    before, grads = ([leaf.to(wide_dtype(leaf)) for leaf in leaves[n::2]] for n in (0, 1))
    if is_function(rule):
        return _directions(rule, context, before[0].view(TOKENS, -1), grads[0].view(TOKENS, -1))
    segments = []
    for weight, grad, is_matrix in zip(before, grads, (True, False), strict=True):
        state = {name: torch.zeros_like(weight) for name in rule.state_names}
        segments.append(Segment(weight.clone(), grad.clone(), state, is_matrix=is_matrix, weight_decay=is_matrix))
    updated = rule(segments, OptimizerConfig(name=context.optimizer, lr=RATE, weight_decay=RATE))
    no_skip = torch.zeros((), device=before[0].device)
    factor = torch.full_like(no_skip, CLIP_COEFFICIENT, dtype=torch.float64)
    for step in (1, 2):
        for segment, grad in zip(segments, grads, strict=True):
            segment.grad.copy_(grad * step)
        if OPTIMIZERS[context.optimizer].facts["unit_of_work"] == "elements":
            updated.step(RATE, step, factor, no_skip)
        else:
            updated.compute_updates(step, no_skip)
            norms = [tensor.double().norm() for tensor in (segments[0].weight, segments[0].grad)]
            updated.apply_updates(RATE, torch.stack(norms).view(2, 1), no_skip)
    changes = [segment.weight - weight for segment, weight in zip(segments, before, strict=True)]
    return [*changes, *(segment.state[name] for segment in segments for name in rule.state_names)]


WEIGHT_CASES = {
    "linear": OperationCase(_matrices, _multiply),
    "wgrad": OperationCase(
        lambda context: draw((TOKENS, 2 * TOKENS), (TOKENS, context.model.hidden_size)), _accumulate
    ),
    "optimizer": OperationCase(_weights, _update),
}
"""Test cases of the operations on weights."""
