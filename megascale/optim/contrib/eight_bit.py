"""Rules with moments in 8 bits (Dettmers et al. 2021, arXiv:2110.02861): AdamW, also in FP8
(`optim.contrib.expanded_fp8`), and GaLore.

Blocks of 256 elements have a scale, their largest magnitude. An element is the nearest of 256 values between -1 and 1,
or 0 and 1 for second moments, times the scale. The values are dense near zero ("dynamic tree"): seven decades, the
upper ones with more values. A matrix is on its owner, so that blocks are the same in every layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from megascale.catalog.optimizers import QUANTIZED_BLOCK
from megascale.ops.optimizer import Update, UpdateInput, UpdateRule
from megascale.optim.adam import adam
from megascale.optim.contrib.expanded_fp8 import contracted, expanded, in_rows
from megascale.optim.contrib.galore import galore

SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # the tensors of state in 8 bits: with a sign or without

DECADES = 7


def adamw_8bit(given: UpdateInput) -> Update:
    """Return AdamW's direction of a matrix [m, n], and moments in 8 bits."""
    return in_8_bits(adam, given)


def galore_8bit(given: UpdateInput) -> Update:
    """Return GaLore's direction of a matrix [m, n], and the subspace and moments in 8 bits."""
    return in_8_bits(galore, given)


def in_8_bits(rule: UpdateRule, given: UpdateInput) -> Update:
    """Apply a rule to state in 8 bits: the codes of a tensor [...], uint8, and what its blocks or groups have."""
    fp8 = given.options.get("codes") == "e4m3"
    state = {name: values for name, values in given.state.items() if not name.endswith(("_scale", "_power"))}
    moments = {
        name: contracted(given.state, name) if fp8
        else dequantized(given.state[name], given.state[f"{name}_scale"], signed)
        for name, signed in SIGNED.items()
    }  # fmt: skip
    direction, new = rule(replace(given, state=state | moments))
    for name, signed in SIGNED.items():
        new |= (expanded if fp8 else quantized)(name, new[name], signed)
    return direction, new


@lru_cache(2)
def values_of(signed: bool) -> Tensor:
    """Return the 256 values of the codes [256], f64, ascending: 0, 1, and for each decade the centres of equal parts
    of [0.1, 1], in twice as many parts as in the decade below.
    """
    positive = []
    for decade in range(DECADES):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float64)
        positive.append(10.0 ** (decade + 1 - DECADES) * (edges[:-1] + edges[1:]) / 2)
    found = torch.cat([*positive, torch.ones(1, dtype=torch.float64)])
    zeros = torch.zeros(1, dtype=torch.float64)
    return torch.cat([-found[:-1], zeros, found] if signed else [zeros, found]).sort().values


def quantized(name: str, x: Tensor, signed: bool) -> Mapping[str, Tensor]:
    """Return the codes of a tensor, and the scales of its blocks, as state."""
    blocks, table = in_rows(x, QUANTIZED_BLOCK), values_of(signed).to(x)
    scale = blocks.abs().amax(1)
    unit = blocks / scale.clamp(min=torch.finfo(x.dtype).tiny).unsqueeze(1)
    codes = torch.bucketize(unit, (table[:-1] + table[1:]) / 2)
    if not signed:  # a second moment of 0 would make a step of any size
        codes = codes.clamp(min=1) * (unit > 0)
    return {name: codes.to(torch.uint8).view(-1)[: x.numel()].view_as(x), f"{name}_scale": scale}


def dequantized(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Return the tensor of codes and scales."""
    values = values_of(signed).to(scale)[in_rows(codes, QUANTIZED_BLOCK).int()] * scale.unsqueeze(1)
    return values.view(-1)[: codes.numel()].view_as(codes)
