"""The linear layers of experts, and the router's: their gradients go to the main gradients of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale.ops.grouped_gemm import RowGroups, add_biases_, bias_gradients, grouped_gemm, grouped_wgrad
from megascale.ops.quantized import Quantized
from megascale.ops.wgrad import Wgrad
from megascale.parallel.experts.dispatcher import CastTokens
from megascale.parallel.grad_accumulation import ALWAYS_ADDED, Accumulation, accumulate_grad, leaves
from megascale.parallel.linear_gemms import Operand


class GroupedGemms:
    """The GEMMs of experts with activations x [r, k] or their gradients [r, n], in the tensors' dtype; of `weight`
    [experts, ..., k], whose dimensions between are the n outputs. A subclass may quantize.
    """

    def forward(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        """Compute x W_e^T [r, n]."""
        return grouped_gemm(x, weight.flatten(1, -2), groups)

    def dgrad(self, grad: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        """Compute grad W_e [r, k]."""
        return grouped_gemm(grad, weight.flatten(1, -2).transpose(-2, -1), groups)

    def wgrad_source(self, x: Tensor) -> Operand:
        """Return what is saved of an input for wgrad, before its forward."""
        return x

    def wgrad(self, total: Tensor, grad: Tensor, x: Operand, groups: RowGroups, wgrad: Wgrad, add: bool) -> None:
        """Write each expert's grad^T x into `total` [experts, n, k], or add it with `add`; x is a `wgrad_source`."""
        assert isinstance(x, Tensor)
        grouped_wgrad(total, grad, x, groups, wgrad, add)

    @property
    def cast_tokens(self) -> CastTokens | None:
        """The cast of tokens before they are sent to experts; None if their rows travel in their own dtype."""
        return None


HIGH_PRECISION_GROUPS = GroupedGemms()


def grouped_linear(
    x: Tensor, weight: Tensor, groups: RowGroups, bias: Tensor | None = None, factors: Tensor | None = None,
    gemms: GroupedGemms = HIGH_PRECISION_GROUPS,
) -> Tensor:  # fmt: skip
    """Compute y = x W_e^T for rows x [r, k] of each expert e, and `weight` [experts, ..., k], whose dimensions between
    are the n outputs: [r, n]; plus `bias` [experts, ...], times the rows' `factors` [r, 1]. Saved for backward: x, or
    its codes if they serve wgrad.
    """
    return _GroupedLinear.apply(x, weight, groups, bias, factors, gemms)


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute logits x W^T + b [t, experts] of tokens x [t, h], accumulated in fp32, or in fp64 of fp64."""
    return _RouterLogits.apply(x, weight, bias)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, groups: RowGroups, bias: Tensor | None, factors: Tensor | None,
        gemms: GroupedGemms,
    ) -> Tensor:  # fmt: skip
        source = gemms.wgrad_source(x)
        tensors: tuple[Tensor, ...]
        if isinstance(source, Quantized):
            tensors, ctx.restore = source.tensors, source.constructor()
        else:
            tensors, ctx.restore = (source,), lambda x: x
        ctx.save_for_backward(factors, *tensors)
        ctx.weight, ctx.bias = weight, bias  # themselves: a saved weight that hooks restore has no main gradient
        ctx.groups, ctx.gemms = groups, gemms
        out = gemms.forward(x, weight, groups)
        if bias is not None:
            add_biases_(out, bias.flatten(1), factors, groups)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (factors, *tensors), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        x, grad = ctx.restore(*tensors), grads[0].contiguous()
        grad_x = ctx.gemms.dgrad(grad, weight, ctx.groups)
        grad_bias = grad_factors = None
        if bias is not None:
            total, grad_factors = bias_gradients(grad, bias.flatten(1), factors, ctx.groups)
            grad_bias = accumulate_grad(bias, total.view_as(bias))
        return grad_x, _accumulate(weight, grad, x, ctx.groups, ctx.gemms), None, grad_bias, grad_factors, None


def _accumulate(weight: Tensor, grad: Tensor, x: Operand, groups: RowGroups, gemms: GroupedGemms) -> Tensor | None:
    """Add each expert's grad^T x to the main gradient of `weight`; without one, return the gradient."""
    if leaves(_accumulate, weight, grad, x, groups, gemms):
        return None
    main: Tensor | None = getattr(weight, "main_grad", None)
    accumulation: Accumulation = getattr(weight, "accumulation", ALWAYS_ADDED)
    total = torch.empty_like(weight) if main is None else main
    matrices = total.view(len(weight), grad.shape[1], x.shape[1])
    gemms.wgrad(matrices, grad, x, groups, accumulation.wgrad, main is not None and accumulation.mark_begun())
    return total if main is None else None


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias
        wide = torch.promote_types(x.dtype, torch.float32)
        if not x.is_cpu and x.dtype != wide:  # one GEMM of the operands as they are
            logits = torch.mm(x, weight.t(), wide)
        else:
            logits = torch.mm(x.to(wide), weight.to(wide).t())
        return logits if bias is None else logits.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        grad = grads[0]
        grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype)
        grad_bias = None if bias is None else accumulate_grad(bias, grad.sum(0))
        return grad_x, _accumulate_router(weight, grad, x), grad_bias


def _accumulate_router(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Add grad^T x in the dtype of `grad` to the gradient of a router's weight."""
    if leaves(_accumulate_router, weight, grad, x):
        return None
    return accumulate_grad(weight, grad.t() @ x.to(grad.dtype))
