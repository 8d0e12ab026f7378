"""RMSNorm over a width that is sharded over the tp group: every rank holds its columns of x and of the gain g.

    forward   y  = x_hat g                             x_hat = x rstd, rstd = 1 / sqrt(mean(x^2) + eps), g = w + offset
    backward  dx = rstd (dy g - x_hat mean(dy g x_hat))    dw = sum over tokens of dy x_hat; means: over tp and columns

Both passes have an all-reduce of one element per token and tensor, in the accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.ops.norm import widened
from megascale.parallel.tp_overlap import TensorParallel
from megascale.record.label import Label


def sharded_rms_norms(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], eps: float, tp: TensorParallel, label: Label,
    offset: float = 0.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Divide each of `inputs` [s, b, width / tp] by its RMS and multiply it by its gain; one all-reduce for all.

    The gain is weight + `offset`, [width / tp]. `offset`: 1 for a zero-centered gamma (Gemma), else 0.
    """
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
        rstds = torch.stack([(sums / width).add_(eps).rsqrt_() for sums, width in zip(squares, widths, strict=True)])
        ctx.save_for_backward(rstds, *tensors)
        return tuple(
            (widened(x) * rstd.unsqueeze(-1)).mul_(widened(weight) + offset).to(x.dtype)
            for x, weight, rstd in zip(inputs, weights, rstds, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rstds, *tensors = ctx.saved_tensors
        inputs, weights = _halves(tensors)
        gains = [widened(weight) + ctx.offset for weight in weights]
        x_hats = [widened(x) * rstd.unsqueeze(-1) for x, rstd in zip(inputs, rstds, strict=True)]
        dy_x_hats = [widened(grad) * x_hat for grad, x_hat in zip(grads, x_hats, strict=True)]
        sums = torch.stack([(dy_x_hat * gain).sum(-1) for dy_x_hat, gain in zip(dy_x_hats, gains, strict=True)])
        all_reduce(ctx.tp.group, sums, label=ctx.label.for_backward("gradient"))
        grad_inputs, grad_weights = [], []
        for x, weight, grad, gain, x_hat, dy_x_hat, rstd, total in zip(
            inputs, weights, grads, gains, x_hats, dy_x_hats, rstds, sums, strict=True
        ):
            mean = (total / (x.shape[-1] * ctx.tp.size)).unsqueeze(-1)
            grad_x = (widened(grad) * gain).addcmul_(x_hat, mean, value=-1).mul_(rstd.unsqueeze(-1))
            grad_inputs.append(grad_x.to(x.dtype))
            grad_weights.append(dy_x_hat.flatten(0, -2).sum(0).to(weight.dtype))
        return None, None, None, None, *grad_inputs, *grad_weights


def _halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Split (inputs, weights) into inputs and weights."""
    count = len(tensors) // 2
    return tensors[:count], tensors[count:]
