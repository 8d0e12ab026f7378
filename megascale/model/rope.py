"""Rotary position embedding (Su et al. 2021): pairs (i, i + d/2) of a head turn by an angle that grows with position."""

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


def rotate(x_sbnd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x [s, b, n, d] turned by the table's angles, in fp32 or wider."""
    return _Rotate.apply(x_sbnd, cos, sin)


class _Rotate(torch.autograd.Function):
    """Written out because four passes over half a head are fewer than autograd would take; nothing is saved but angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, -1.0), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, -1)
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    out_first, out_second = out.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out.to(x.dtype)
