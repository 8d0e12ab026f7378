"""Rotary position embedding (Su et al. 2021), non-interleaved. At position p, elements i and i + d/2 of a head:

x1' = x1 cos a - x2 sin a    x2' = x2 cos a + x1 sin a    a = p theta^(-2 i / d)    backward: the angle -a
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from megascale.ops import compiled
from megascale.ops.select import NotByDefault, OpBackend, OpContext

Rotate = Callable[[Tensor, int, Tensor, Tensor], Tensor]
"""Arguments: heads [s, b, n, d]; `turned`, the number of leading heads (queries and keys) to rotate, values being left
alone; cos and sin [s, 1, 1, d / 2], whose dtype is the dtype of computation.
"""

Turn = Callable[[Tensor, int, Tensor, Tensor, float], Tensor]
"""`Rotate` by `sign` times the angles. The opposite sign gives the inverse, which is also the transpose."""


@lru_cache(maxsize=8)
def rope_table(s: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin [s, 1, 1, head_dim / 2] of position * theta^(-2 i / head_dim), computed in fp64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(s, dtype=torch.float64), theta**-exponents)[:, None, None, :]
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


class TorchRope(OpBackend):
    """torch's operators: four passes over half a head, and copies if table and heads differ in dtype."""

    def build(self, context: OpContext) -> Rotate:
        return rotate_heads


class CompiledRope:
    """A compiled kernel for forward and a compiled kernel for backward."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        not_default = NotByDefault("on a CPU compiling delays the first step") if context.device.is_cpu else None
        return compiled.compile_unsupported_reason(context.device) or not_default

    def build(self, context: OpContext) -> Rotate:
        return partial(_rotate, compiled.compile_function(rotation))


def rotate_heads(qkv_sbnd: Tensor, turned: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Implement `Rotate`."""
    return _rotate(_turn, qkv_sbnd, turned, cos, sin)


def _rotate(turn: Turn, qkv_sbnd: Tensor, turned: int, cos: Tensor, sin: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # inside a compiled block
        return rotation(qkv_sbnd, turned, cos, sin)
    return _RotateHeads.apply(qkv_sbnd, turned, cos, sin, turn)


class _RotateHeads(torch.autograd.Function):
    """Rotation with the inverse rotation as backward; only cos and sin are saved."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, turned: int, cos: Tensor, sin: Tensor, turn: Turn) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turned, ctx.turn = turned, turn
        return turn(qkv, turned, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return ctx.turn(grads[0], ctx.turned, cos, sin, -1.0), None, None, None, None


def _turn(x: Tensor, turned: int, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Implement `Turn` with torch's operators."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x[:, :, :turned].to(cos.dtype).chunk(2, -1)
    target = out[:, :, :turned] if x.dtype == cos.dtype else torch.empty_like(x[:, :, :turned], dtype=cos.dtype)
    target_first, target_second = target.chunk(2, -1)
    torch.mul(first, cos, out=target_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=target_second).addcmul_(first, sin, value=sign)
    if x.dtype != cos.dtype:
        out[:, :, :turned] = target
    out[:, :, turned:] = x[:, :, turned:]
    return out


def rotation(x: Tensor, turned: int, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
    """Implement `Turn` without concatenation: torch.compile fuses the formula to a single loop over the result."""
    halves = x.unflatten(-1, (2, -1)).to(cos.dtype)
    signs = torch.arange(-1, 2, 2, device=x.device).view(2, 1) * sign  # - sin for the first half, + sin for the second
    rotated = halves * cos.unsqueeze(-2) + halves.flip(-2) * (sin.unsqueeze(-2) * signs)
    is_turned = torch.arange(x.shape[2], device=x.device).view(-1, 1) < turned
    return torch.where(is_turned, rotated.flatten(-2).to(x.dtype), x)
