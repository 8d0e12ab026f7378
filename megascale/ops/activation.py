"""Activation functions of the MLP: `gelu`, `gelu_tanh`, `swiglu`, and their backend `TorchActivation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.layers import ACTIVATIONS
from megascale.ops.select import OpBackend, OpContext

Activate = Callable[[Tensor], Tensor]
"""Maps [..., f], or [..., 2 f] with the gate first if gated, to [..., f]."""


class TorchActivation(OpBackend):
    """The activations below, or an activation registered by another package."""

    def build(self, context: OpContext) -> Activate:
        return ACTIVATIONS[context.model.activation].load()


def gelu(x: Tensor) -> Tensor:
    """Return x Phi(x), element-wise (Hendrycks and Gimpel 2016)."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU, as in GPT-2."""
    return F.gelu(x, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [..., f] for gate_up [..., 2 f], gate first (Shazeer 2020)."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    """SwiGLU with only the input saved for backward, and both halves of the gradient written to one tensor."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        (grad,) = grads
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out
