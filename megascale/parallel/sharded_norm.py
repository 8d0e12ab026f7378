"""RMSNorm over a width that is sharded over the tp group: every rank holds its columns of x and of the gain.

    forward   y  = x r (w + offset)                  r = 1 / sqrt(sum over tp of x^2 / width + eps)
    backward  dx = r (dy w - x r mean(dy w x r))     the mean is a sum over tp; dw = sum over tokens of dy x r

Both passes have an all-reduce of one element per token and tensor, in the accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.core.label import Label
from megascale.ops.norm import widened
from megascale.parallel.tp_overlap import TensorParallel


def sharded_rms_norms(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], eps: float, tp: TensorParallel, label: Label,
    offset: float = 0.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Normalize each of `inputs` [s, b, width / tp] by its gain weight + `offset` [width / tp], with one all-reduce."""
    return _ShardedRMSNorms.apply(tp, label, eps, offset, *inputs, *weights)


class _ShardedRMSNorms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tp: TensorParallel, label: Label, eps: float, offset: float, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.tp, ctx.label, ctx.offset = tp, label, offset
        inputs, weights = _halves(tensors)
        squares = torch.stack([torch.linalg.vector_norm(widened(x), dim=-1).square_() for x in inputs])
        all_reduce(tp.group, squares, label=label)
        widths = [x.shape[-1] * tp.size for x in inputs]
        scales = torch.stack([(sums / width).add_(eps).rsqrt_() for sums, width in zip(squares, widths, strict=True)])
        ctx.save_for_backward(scales, *tensors)
        return tuple(
            (widened(x) * scale.unsqueeze(-1)).mul_(widened(weight) + offset).to(x.dtype)
            for x, weight, scale in zip(inputs, weights, scales, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scales, *tensors = ctx.saved_tensors
        inputs, weights = _halves(tensors)
        gains = [widened(weight) + ctx.offset for weight in weights]
        units = [widened(x) * scale.unsqueeze(-1) for x, scale in zip(inputs, scales, strict=True)]
        products = [widened(grad) * unit for grad, unit in zip(grads, units, strict=True)]
        sums = torch.stack([(product * gain).sum(-1) for product, gain in zip(products, gains, strict=True)])
        all_reduce(ctx.tp.group, sums, label=ctx.label.for_backward("gradient"))
        grad_inputs, grad_weights = [], []
        for x, weight, grad, gain, unit, product, scale, total in zip(
            inputs, weights, grads, gains, units, products, scales, sums, strict=True
        ):
            mean = (total / (x.shape[-1] * ctx.tp.size)).unsqueeze(-1)
            grad_x = (widened(grad) * gain).addcmul_(unit, mean, value=-1).mul_(scale.unsqueeze(-1))
            grad_inputs.append(grad_x.to(x.dtype))
            grad_weights.append(product.flatten(0, -2).sum(0).to(weight.dtype))
        return None, None, None, None, *grad_inputs, *grad_weights


def _halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    count = len(tensors) // 2
    return tensors[:count], tensors[count:]
