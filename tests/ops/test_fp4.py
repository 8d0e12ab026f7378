"""Casts to E2M1: nearest with ties to even, and stochastic by given bytes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megascale.ops import fp4

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat([VALUES, -VALUES])
BYTES = torch.arange(256, dtype=torch.uint8)


def every_bf16() -> Tensor:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).float() * 1  # NaNs become quiet


def test_every_bf16_number_has_the_nearest_code() -> None:
    """The distance decides, and of two equal ones the even code. NaN has the largest, as in hardware."""
    x = every_bf16()
    numbers = x.clamp(-6, 6).nan_to_num(6).double()
    distance = (numbers.abs().unsqueeze(1) - VALUES[:8].double()).abs()
    near = distance == distance.amin(1, keepdim=True)
    even = near & (torch.arange(8) % 2 == 0)
    code = torch.where(near.sum(1) == 2, even.int().argmax(1), near.int().argmax(1))
    assert torch.equal(fp4.nearest(x), (code + 8 * (numbers < 0)).to(torch.uint8))


def test_ties() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert fp4.nearest(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    below, above = (torch.nextafter(ties, torch.tensor(end)) for end in (-math.inf, math.inf))
    assert fp4.nearest(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert fp4.nearest(-above).tolist() == [9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("x", "byte", "rounded"),
    [(0.6, 204, 0.5), (0.6, 205, 1), (-0.6, 205, -1), (5, 127, 4), (5, 128, 6), (3, 255, 3), (6.5, 3, 6)],
)
def test_stochastic_rounding_by_a_byte(x: float, byte: int, rounded: float) -> None:
    assert VALUES[fp4.stochastic(torch.tensor([x]), torch.tensor([byte], dtype=torch.uint8)).int()].item() == rounded


def test_stochastic_rounding_is_unbiased_and_gives_both_neighbours() -> None:
    """The mean over all bytes is within step / 256 of x. Numbers of the format stay."""
    x = torch.linspace(-6, 6, 2401)
    found = VALUES[fp4.stochastic(x.unsqueeze(1), BYTES).int()]
    low = VALUES[:8][torch.bucketize(x.abs(), VALUES[1:8].contiguous(), right=True)]
    high = VALUES[:8][torch.bucketize(x.abs(), VALUES[:8].contiguous()).clamp(max=7)]
    sizes = found.abs()
    assert torch.all((sizes == low.unsqueeze(1)) | (sizes == high.unsqueeze(1)))
    assert torch.all(found * x.unsqueeze(1) >= 0)
    bias = sizes.double().mean(1) - x.abs()
    assert torch.all(bias.abs() <= (high - low) / 256 + 1e-6)
    assert torch.equal(found[low == high], x[low == high].unsqueeze(1).expand(-1, 256))
    assert bias.mean() == pytest.approx(-0.0023, abs=2e-4)
