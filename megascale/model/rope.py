"""Rotary position embedding (Su et al. 2021): pairs (i, i + d/2) of a head turn by an angle that grows with
position.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def rope_table(s: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each [s, 1, 1, head_dim / 2], of position x theta^(-2 i / head_dim), formed in fp64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(s, dtype=torch.float64), theta**-exponents)[:, None, None, :]
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate_heads(qkv_sbnd: Tensor, turned: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [s, b, n, d] of which the first `turned` (queries and keys) turn by the table's angles; the others (values)
    stay. Computed in the table's format.
    """
    if torch.compiler.is_compiling():
        return rotation(qkv_sbnd, turned, cos, sin)
    return _RotateHeads.apply(qkv_sbnd, turned, cos, sin)


def rotation(qkv_sbnd: Tensor, turned: int, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_heads` as a formula, for compilers."""
    first, second = qkv_sbnd[:, :, :turned].to(cos.dtype).chunk(2, -1)
    heads = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([heads.to(qkv_sbnd.dtype), qkv_sbnd[:, :, turned:]], 2)


class _RotateHeads(torch.autograd.Function):
    """Written out because four passes over half a head are fewer than autograd would take; nothing is saved but
    angles.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, turned: int, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turned = turned
        return _turn(qkv, turned, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], ctx.turned, cos, sin, -1.0), None, None, None


def _turn(x: Tensor, turned: int, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """The rotation by `sign` times the angles; its own inverse and transpose with the sign changed."""
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
