"""Activation functions of the MLP: `gelu`, `gelu_tanh`, `swiglu`, `geglu`, `clamped_swiglu`, and their backends
`TorchActivation` and `TritonActivation`; and `scaled_tanh`, of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.layers import ACTIVATIONS
from megascale.ops.library import triton_unsupported_reason
from megascale.ops.select import NotByDefault, OpBackend, OpContext

Activate = Callable[[Tensor], Tensor]
"""Maps [..., f], or [..., 2 f] with the gate first if gated, to [..., f]."""


class TorchActivation(OpBackend):
    """The activations below, or an activation registered by another package."""

    def build(self, context: OpContext) -> Activate:
        return ACTIVATIONS[context.model.activation].load()


class TritonActivation(OpBackend):
    """Triton's kernels of SwiGLU, which find an amax for FP8 layers, or cast."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        unwanted = None if context.casts_by_tensor else NotByDefault("no FP8 layer takes its amaxes or casts")
        return triton_unsupported_reason(context.device) or unwanted

    def build(self, context: OpContext) -> Activate:
        from megascale.ops.triton_swiglu import swiglu

        return swiglu


def gelu(x: Tensor) -> Tensor:
    """Return x Phi(x), element-wise (Hendrycks and Gimpel 2016)."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU, as in GPT-2."""
    return F.gelu(x, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [..., f] for gate_up [..., 2 f], gate first (Shazeer 2020)."""
    return _Gated.apply(gate_up, F.silu, torch.ops.aten.silu_backward)


def geglu(gate_up: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up [..., f] for gate_up [..., 2 f], gate first, as in Gemma (Shazeer 2020)."""
    return _Gated.apply(gate_up, gelu_tanh, partial(torch.ops.aten.gelu_backward, approximate="tanh"))


LIMIT, SLOPE = 7.0, 1.702
"""The bound of gate and up in `clamped_swiglu`, and the slope of its sigmoid, which approximates GELU."""


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """Return gate * sigmoid(1.702 gate) * (up + 1) [..., f] for gate_up [..., 2 f], gate first, with gate at most 7 and
    up between -7 and 7, as in gpt-oss.
    """
    return _ClampedSwiGLU.apply(gate_up)


class _ClampedSwiGLU(torch.autograd.Function):
    """With only the input saved for backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        gate = gate.clamp(max=LIMIT)
        return (gate * SLOPE).sigmoid_().mul_(gate).mul_(up.clamp(-LIMIT, LIMIT).add_(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, -1)
        bounded = gate.clamp(max=LIMIT)
        sigmoid = (bounded * SLOPE).sigmoid_()
        beyond = torch.abs(up, out=grad_gate) > LIMIT  # the gradient's halves hold what is between
        torch.mul(grads[0], bounded, out=grad_up).mul_(sigmoid).masked_fill_(beyond, 0.0)
        bounded.mul_(torch.neg(sigmoid, out=grad_gate).add_(1)).mul_(SLOPE).add_(1).mul_(sigmoid).mul_(grads[0])
        beyond = torch.gt(gate, LIMIT, out=beyond)
        torch.clamp(up, -LIMIT, LIMIT, out=grad_gate).add_(1).mul_(bounded).masked_fill_(beyond, 0.0)
        return out


def scaled_tanh(x: Tensor, alpha: Tensor) -> Tensor:
    """Return tanh(alpha x) for x of any shape and alpha [1] (Zhu et al. 2025)."""
    return _ScaledTanh.apply(x, alpha)


class _ScaledTanh(torch.autograd.Function):
    """With only the input saved for backward, and a sum for alpha in fp32 or wider."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha)
        return (x * alpha).tanh_()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, alpha = ctx.saved_tensors
        inner = torch.ops.aten.tanh_backward(grads[0], (x * alpha).tanh_())  # the gradient of alpha x
        wide = torch.promote_types(x.dtype, torch.float32)
        return inner * alpha, (inner * x).sum(dtype=wide).to(alpha.dtype).view(1)


class _Gated(torch.autograd.Function):
    """f(gate) * up with only the input saved for backward, and both halves of the gradient written to one tensor.

    `function`: f, into a new tensor; `backward_of`: (gradient of f's result, f's input) to the gradient of f's input.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, function: Activate, backward_of: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.function, ctx.backward_of = function, backward_of
        gate, up = gate_up.chunk(2, -1)
        return function(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        (grad,) = grads
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(grad, ctx.function(gate), out=grad_up)
        grad_gate.copy_(ctx.backward_of(grad * up, gate))
        return out, None, None
