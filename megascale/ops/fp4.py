"""Casts to E2M1, the 4-bit element of NVFP4, which torch does not have.

code        0    1    2    3    4    5    6    7        + 8 for negative numbers
magnitude   0   0.5   1   1.5   2    3    4    6
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 6.0
SIGN = 8  # the sign's bit of a code


def nearest(x: Tensor) -> Tensor:
    """Round x, f32, to codes, u8, of the nearest magnitudes; of two equally near ones to the even code."""
    return _codes(x, _magnitude(x), torch.round)


def stochastic(x: Tensor, byte: Tensor) -> Tensor:
    """Round x, f32, to codes, u8, of one of the two nearest magnitudes: to the upper one where a random `byte`, u8, is
    large enough. In the mean over all bytes the result is below x by 1 / 512 of the distance of the two.
    """
    magnitude = _magnitude(x)
    return _codes(x, (magnitude + byte / 256 * _step(magnitude)).clamp(max=LARGEST), torch.floor)


def _magnitude(x: Tensor) -> Tensor:
    """Return |x| up to the largest magnitude, which also stands for NaN, as in hardware."""
    return torch.fmin(x.abs(), x.new_full((), LARGEST))


def _step(magnitude: Tensor) -> Tensor:
    """Return the distance of the magnitudes around a number."""
    return torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))


def _codes(x: Tensor, magnitude: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the codes of magnitudes, `rounded` in steps, with the signs of x."""
    first = torch.where(magnitude < 2, 0.0, torch.where(magnitude < 4, 2.0, 4.0))
    code = rounded(magnitude / _step(magnitude)) + first
    return code.to(torch.uint8) | (x < 0).to(torch.uint8) * SIGN
