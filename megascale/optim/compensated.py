"""Master weights as pairs of bf16 numbers (Collage, Yu et al. 2024, arXiv:2405.03637).

    master weight = weight + residual

`weight` is the model's own, `residual` what rounding to it left over. A pair has 16 bits of significand in 4 bytes,
weights included, where a separate fp32 master takes 6. A step adds in fp32, and splits the sum again.
"""

from __future__ import annotations

import torch
from torch import Tensor


def whole(weight: Tensor, residual: Tensor | None) -> Tensor:
    """Return the master weight: fp32 of a pair; without `residual`, the weight itself."""
    return weight if residual is None else weight.float() + residual.float()


def split(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split an fp32 value into the nearest number of a dtype and the nearest to the rest."""
    high = value.to(dtype)
    return high, (value - high.float()).to(dtype)
