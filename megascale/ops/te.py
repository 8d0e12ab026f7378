"""Transformer Engine's kernels for norms and activations, called as by its own modules.

Importing the library loads `transformer_engine_torch`, the extension with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megascale.catalog.layers import NORMS
from megascale.ops.activation import Activate
from megascale.ops.library import TE
from megascale.ops.norm import Normalize
from megascale.ops.select import OpContext


class TENorm:
    """`rmsnorm_fwd`, `layernorm_fwd` and their backwards, with fp32 statistics."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return TE.unsupported_reason(context)

    def build(self, context: OpContext) -> Normalize:
        if context.model.norm == "layernorm":
            return _LayerNorm.apply
        zero_centered = NORMS[context.model.norm].facts["offset"] == 1
        return lambda x, weight, bias, eps: _RMSNorm.apply(x, weight, eps, zero_centered)


class TEActivation:
    """`swiglu`, and `geglu` and `gelu` in the tanh approximation."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return TE.unsupported_reason(context)

    def build(self, context: OpContext) -> Activate:
        import transformer_engine_torch as tex

        names = {
            "swiglu": (tex.swiglu, tex.dswiglu), "geglu": (tex.geglu, tex.dgeglu), "gelu_tanh": (tex.gelu, tex.dgelu),
        }  # fmt: skip
        forward, backward = names[context.model.activation]
        return lambda x: _Activation.apply(x, forward, backward)


def _rows(x: Tensor) -> Tensor:
    """View x as contiguous [rows, columns], the shape required by the kernels."""
    return x.contiguous().view(-1, x.shape[-1])


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.constants import TE_DType

        # out, quantizer, output dtype, SM margin, zero-centered gain
        out, _, scale = tex.rmsnorm_fwd(_rows(x), weight, eps, None, None, TE_DType[x.dtype], 0, zero_centered)
        ctx.zero_centered = zero_centered
        ctx.save_for_backward(x, weight, scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        import transformer_engine_torch as tex

        x, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = tex.rmsnorm_bwd(_rows(grads[0]), _rows(x), scale, weight, 0, ctx.zero_centered)
        return grad_x.view(x.shape), grad_weight, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.constants import TE_DType

        out, mean, scale = tex.layernorm_fwd(_rows(x), weight, bias, eps, None, None, TE_DType[x.dtype], 0, False)
        ctx.save_for_backward(x, weight, mean, scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        import transformer_engine_torch as tex

        x, weight, mean, scale = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = tex.layernorm_bwd(_rows(grads[0]), _rows(x), mean, scale, weight, 0, False)
        return grad_x.view(x.shape), grad_weight, grad_bias if ctx.needs_input_grad[2] else None, None


Kernel = Callable[..., Tensor]
"""Arguments: (x, quantizer) in forward, (gradient, x, quantizer) in backward."""


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Kernel, backward: Kernel) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kernel = backward
        out = forward(_rows(x), None)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return ctx.kernel(_rows(grads[0]), _rows(x), None).view(x.shape), None, None
