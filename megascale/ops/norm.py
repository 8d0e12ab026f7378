"""LayerNorm and RMSNorm over the last dimension, alone or after a residual addition. Statistics are fp32 or wider."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.backends import AUTO
from megascale.catalog.layers import NORMS
from megascale.ops.select import NotByDefault, OpBackend, OpContext, build_op

Normalize = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
"""Arguments: x [..., h], gain [h], bias [h] or None, eps. Result: [..., h]."""

AddNormalize = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
"""Arguments: x and branch [..., h], then as `Normalize`. Results: x + branch, and its norm."""


class TorchNorm(OpBackend):
    """The norms below, or a norm registered by another package."""

    def build(self, context: OpContext) -> Normalize:
        return NORMS[context.model.norm].load()


class TorchAddNorm(OpBackend):
    """A residual addition, then the selected backend of `norm`."""

    def build(self, context: OpContext) -> AddNormalize:
        return compose_add_norm(build_op("norm", context))


def compose_add_norm(normalize: Normalize) -> AddNormalize:
    """Combine a residual addition and a norm in one function."""

    def add_normalize(
        x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = x + branch
        return x, normalize(x, weight, bias, eps)

    return add_normalize


def other_norm_requested(context: OpContext, name: str) -> NotByDefault | None:
    """Decline `add_norm` under auto if `backends.norm` requests a different backend."""
    requested = context.backends.norm
    return None if requested in (AUTO, name) else NotByDefault(f"backends.norm is {requested}")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias for x [..., h] (Ba et al. 2016)."""
    if x.is_cpu and widened(x) is not x:
        return _NarrowLayerNorm.apply(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class _NarrowLayerNorm(torch.autograd.Function):
    """LayerNorm in bf16 on a CPU, with fp32 statistics and sums. torch's own sums gradients of gain and bias in bf16,
    and loses a tenth of their value at 8,192 tokens.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        shape, gain = list(weight.shape), widened(weight)
        out, mean, scale = torch.native_layer_norm(x, shape, gain, None if bias is None else widened(bias), eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        output_mask = [True, True, bias is not None]
        wide = [widened(weight), None if bias is None else widened(bias)]
        grads_wide = torch.ops.aten.native_layer_norm_backward(
            widened(grads[0]), widened(x), list(weight.shape), mean, scale, *wide, output_mask
        )
        return *(g.to(x.dtype) if g is not None else None for g in grads_wide), None


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight for x [..., h] (Zhang and Sennrich 2019). `bias` must be None."""
    return _RMSNorm.apply(x, weight, eps, 0.0)


def rms_norm_1p(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (1 + weight) for x [..., h], as in Gemma. `bias` must be None.

    The gain is formed in fp32 or wider. Weights near zero keep more digits in bf16 than gains near one.
    """
    return _RMSNorm.apply(x, weight, eps, 1.0)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with gain weight + `offset`, and a backward four times as fast on a CPU as torch's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        ctx.offset = offset
        wide, h = widened(x), x.shape[-1]
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(h).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(_gain(weight, offset)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        grad, unit = widened(grads[0]), widened(x) * scale  # unit: x normalised, before the gain
        grad_unit = grad * unit
        gain, h = _gain(weight, ctx.offset), x.shape[-1]
        # d/dx = scale (g w - unit mean(g w unit)) for a gain w; the mean is a matrix-vector multiplication with w
        mean = grad_unit.reshape(-1, h).mv(gain).div_(h).view(*x.shape[:-1], 1)
        grad_x = (grad * gain).addcmul_(unit, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_unit.reshape(-1, h).sum(0).to(weight.dtype), None, None


def _gain(weight: Tensor, offset: float) -> Tensor:
    return widened(weight) + offset if offset else widened(weight)


def widened(t: Tensor) -> Tensor:
    """Cast bf16 and fp16 to fp32; return wider tensors unchanged."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
