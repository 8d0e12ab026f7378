"""Inverse frequencies of rotary embeddings scaled for longer sequences: `linear`, `dynamic`, `llama3`, `yarn`, as in
transformers. Arguments and results are those of `rope.RopeScaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.config.model import yarn_mscale
from megascale.ops.rope import inverse_frequencies


def linear(d: int, theta: float, s: int, keys: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Divide all frequencies by `factor`."""
    return inverse_frequencies(d, theta) / keys["factor"], 1.0


def dynamic(d: int, theta: float, s: int, keys: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Raise theta such that the lowest frequency is divided by factor * s / original - (factor - 1); without effect up
    to the original length.
    """
    stretch = max(s / keys["original_seq_length"], 1.0)
    divisor = keys["factor"] * stretch - (keys["factor"] - 1)
    return inverse_frequencies(d, theta * divisor ** (d / (d - 2))), 1.0


def llama3(d: int, theta: float, s: int, keys: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Divide frequencies with fewer than `low_freq_factor` turns over the original length by `factor`, and keep those
    with more than `high_freq_factor` turns; interpolate between them.
    """
    frequencies = inverse_frequencies(d, theta)
    turns = keys["original_seq_length"] * frequencies / (2 * math.pi)
    low, high = keys["low_freq_factor"], keys["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / keys["factor"]), 1.0


def yarn(d: int, theta: float, s: int, keys: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Keep frequencies with more than `beta_fast` turns over the original length, divide those with fewer than
    `beta_slow` turns by `factor`; the share divided grows linearly with i between the two. `truncate` rounds both ends
    of this range outwards.
    """

    def dimension(turns: float) -> float:
        return d * math.log(keys["original_seq_length"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(keys.get("beta_fast", 32.0)), dimension(keys.get("beta_slow", 1.0))
    if keys.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    width = last - first or 0.001  # of a range that is a point
    divided = ((torch.arange(d // 2, dtype=torch.float64) - first) / width).clamp(0, 1)
    frequencies = inverse_frequencies(d, theta)
    return frequencies * (1 - divided + divided / keys["factor"]), _yarn_factor(keys)


def _yarn_factor(keys: Mapping[str, Any]) -> float:
    """Return the factor of cos and sin: `attention_factor`, or 0.1 ln(factor) + 1, or a ratio of two such terms."""
    if "attention_factor" in keys:
        return float(keys["attention_factor"])
    if "mscale" in keys and "mscale_all_dim" in keys:
        return yarn_mscale(keys["factor"], keys["mscale"]) / yarn_mscale(keys["factor"], keys["mscale_all_dim"])
    return yarn_mscale(keys["factor"], 1.0)
