"""Normalisation over the last dimension. Statistics are formed in fp32 or wider, whatever the input's format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.backends import AUTO
from megascale.catalog.layers import NORMS
from megascale.ops.select import Backend, Reluctance, Setting, build

Normalize = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
"""x [..., h], gain [h], bias [h] or None, and what is added to the variance."""

AddNormalize = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
"""x and a branch [..., h], and the rest as of `Normalize`, to x + branch and the norm of this sum."""


class TorchNorm(Backend):
    """The norms below, and those that other packages register."""

    def build(self, setting: Setting) -> Normalize:
        return NORMS[setting.model.norm].load()


class TorchAddNorm(Backend):
    """The sum, then its norm by whichever backend serves norms."""

    def build(self, setting: Setting) -> AddNormalize:
        return behind_sum(build("norm", setting))


def behind_sum(normalize: Normalize) -> AddNormalize:
    """Return the sum of two tensors and its norm as one function."""

    def add_normalize(
        x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = x + branch
        return x, normalize(x, weight, bias, eps)

    return add_normalize


def other_norm_asked(setting: Setting, name: str) -> Reluctance | None:
    """Why a backend leaves a norm behind a sum to the backend that `backends.norm` asks for."""
    asked = setting.backends.norm
    return None if asked in (AUTO, name) else Reluctance(f"backends.norm asks for {asked}")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of x [..., h] with gain and bias [h] (Ba et al. 2016)."""
    if x.is_cpu and widened(x) is not x:
        return _NarrowLayerNorm.apply(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class _NarrowLayerNorm(torch.autograd.Function):
    """bf16 on a CPU, where torch rounds the statistics that it keeps to bf16, and sums the gradients of gain and bias
    over tokens in bf16: a tenth of them is lost at 8,192 tokens.
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
        wanted = [True, True, bias is not None]
        wide = [widened(weight), None if bias is None else widened(bias)]
        found = torch.ops.aten.native_layer_norm_backward(
            widened(grads[0]), widened(x), list(weight.shape), mean, scale, *wide, wanted
        )
        return *(g.to(x.dtype) if g is not None else None for g in found), None


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight for x [..., h] (Zhang and Sennrich 2019). `bias` must be None."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """Written out because torch's own, on a CPU, takes four times as long backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide, h = widened(x), x.shape[-1]
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(h).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(widened(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, unit = widened(grads[0]), widened(x) * scale  # unit: x normalised, before the gain
        product = grad * unit
        h = x.shape[-1]
        # d/dx = scale (g w - unit mean(g w unit)); the mean is a product with w
        mean = (product @ widened(weight)).div_(h).unsqueeze_(-1)
        grad_x = (grad * widened(weight)).addcmul_(unit, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), product.reshape(-1, h).sum(0).to(weight.dtype), None


def widened(t: Tensor) -> Tensor:
    """t in fp32, or as it is where its dtype is as wide."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
