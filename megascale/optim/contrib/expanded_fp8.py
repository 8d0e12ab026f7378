"""Moments in FP8 with an expanded range (COAT, Xi et al. 2024, arXiv:2410.19313).

For a group of 128 elements with the largest magnitude M and the least one m above 0:

    code = e4m3(448 sign(x) (|x| / M)^k)        k = log(448 2^9) / log(M / m), at least 1

so that the group fills the range of E4M3, from 2^-9 to 448, where its own range is less. The state has M and k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megascale.catalog.optimizers import EXPANDED_GROUP

LARGEST, SMALLEST = 448.0, 2.0**-9
MOST = 2.0**20  # the largest k: of a group of equal magnitudes it is infinite


def expanded(name: str, x: Tensor, signed: bool) -> Mapping[str, Tensor]:
    """Return the codes of a tensor [...] as bytes, and M and k of its groups, as state. Without a sign an element
    above 0 has a code above 0: a second moment of 0 would make a step of any size.
    """
    groups = in_rows(x, EXPANDED_GROUP)
    magnitude = groups.abs()
    most = magnitude.amax(1)
    least = torch.where(magnitude > 0, magnitude, torch.inf).amin(1)
    power = math.log(LARGEST / SMALLEST) / (most / least).log().clamp(min=0)
    power = torch.where(most > 0, power, 1.0).clamp(1, MOST)
    unit = magnitude / most.clamp(min=torch.finfo(x.dtype).tiny).unsqueeze(1)
    values = LARGEST * unit ** power.unsqueeze(1) * groups.sign()
    if not signed:
        values = values.clamp(min=SMALLEST) * (magnitude > 0)
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8).view(-1)[: x.numel()].view_as(x)
    return {name: codes, f"{name}_scale": most, f"{name}_power": power}


def contracted(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the tensor of what `expanded` returned."""
    most, power = state[f"{name}_scale"], state[f"{name}_power"]
    values = in_rows(state[name], EXPANDED_GROUP).view(torch.float8_e4m3fn).to(most.dtype)
    magnitude = (values.abs() / LARGEST) ** (1 / power).unsqueeze(1) * most.unsqueeze(1)
    return (magnitude * values.sign()).view(-1)[: state[name].numel()].view_as(state[name])


def in_rows(x: Tensor, size: int) -> Tensor:
    """Return the elements of a tensor in rows [k, size], with zeros at the end."""
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)
