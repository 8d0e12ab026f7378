"""The non-linearity of the MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.layers import ACTIVATIONS
from megascale.ops.select import Backend, Setting

Activate = Callable[[Tensor], Tensor]
"""[..., f], or for a gated activation [..., 2 f] with the gate first, to [..., f]."""


class TorchActivation(Backend):
    """The activations below, and those that other packages register."""

    def build(self, setting: Setting) -> Activate:
        return ACTIVATIONS[setting.model.activation].load()


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), element-wise (Hendrycks and Gimpel 2016)."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU that GPT-2 was trained with."""
    return F.gelu(x, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [..., 2 f], gate first; result [..., f] (Shazeer 2020)."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    """Keeps only its input for the backward, and writes both halves of the gradient into one tensor."""

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
