"""Rotary position embedding (Su et al. 2021): pairs (i, i + d/2) of a head turn by an angle that grows with
position.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from megascale.ops import compiled
from megascale.ops.select import Backend, Reluctance, Setting

Rotate = Callable[[Tensor, int, Tensor, Tensor], Tensor]
"""Heads [s, b, n, d] of which the first `turned` (queries and keys) turn by the table's angles; the others (values)
stay. cos and sin [s, 1, 1, d / 2]; computed in their format.
"""

Turn = Callable[[Tensor, int, Tensor, Tensor, float], Tensor]
"""`Rotate` by `sign` times the angles: its own inverse and transpose with the sign changed."""


@lru_cache(maxsize=8)
def rope_table(s: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each [s, 1, 1, head_dim / 2], of position x theta^(-2 i / head_dim), formed in fp64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(s, dtype=torch.float64), theta**-exponents)[:, None, None, :]
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


class TorchRope(Backend):
    """Four passes over half a head, and copies where the table has another format than the heads."""

    def build(self, setting: Setting) -> Rotate:
        return rotate_heads


class CompiledRope:
    """One kernel forwards and one backwards."""

    def refusal(self, setting: Setting) -> str | None:
        slow = Reluctance("on a CPU compiling delays the first step") if setting.device.is_cpu else None
        return compiled.refusal(setting.device) or slow

    def build(self, setting: Setting) -> Rotate:
        return partial(_rotate, compiled.fused(rotation))


def rotate_heads(qkv_sbnd: Tensor, turned: int, cos: Tensor, sin: Tensor) -> Tensor:
    """See `Rotate`."""
    return _rotate(_turn, qkv_sbnd, turned, cos, sin)


def _rotate(turn: Turn, qkv_sbnd: Tensor, turned: int, cos: Tensor, sin: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # as part of a block
        return rotation(qkv_sbnd, turned, cos, sin)
    return _RotateHeads.apply(qkv_sbnd, turned, cos, sin, turn)


class _RotateHeads(torch.autograd.Function):
    """The backward turns back; nothing is saved but angles."""

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
    """`Turn` by torch's operators."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x[:, :, :turned].to(cos.dtype).chunk(2, -1)
    into = out[:, :, :turned] if x.dtype == cos.dtype else torch.empty_like(x[:, :, :turned], dtype=cos.dtype)
    into_first, into_second = into.chunk(2, -1)
    torch.mul(first, cos, out=into_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=into_second).addcmul_(first, sin, value=sign)
    if x.dtype != cos.dtype:
        out[:, :, :turned] = into
    out[:, :, turned:] = x[:, :, turned:]
    return out


def rotation(x: Tensor, turned: int, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
    """`Turn` as a formula for compilers. It concatenates nothing: each number is formed from itself and the other one
    of its pair, so that one loop over the result does it all.
    """
    halves = x.unflatten(-1, (2, -1)).to(cos.dtype)
    side = torch.arange(-1, 2, 2, device=x.device).view(2, 1) * sign  # - sin for the first half, + sin for the second
    turning = halves * cos.unsqueeze(-2) + halves.flip(-2) * (sin.unsqueeze(-2) * side)
    turns = torch.arange(x.shape[2], device=x.device).view(-1, 1) < turned
    return torch.where(turns, turning.flatten(-2).to(x.dtype), x)
