"""Random numbers as functions of a seed and a position: equal on every device and in every layout, without a state.

The numbers are those of SplitMix64 (Steele, Lea and Flood 2014): position x the golden ratio's bits, mixed.
"""

from __future__ import annotations

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIXERS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
"""Shifts and factors of the two rounds; a third shift by 31 bits ends them."""

LAST_SHIFT = 31


def random_integers(seed: int, count: int, device: torch.device) -> Tensor:
    """Draw `count` integers from [0, 2^63): int64 [count]."""
    x = torch.arange(1, count + 1, device=device) * GAMMA + seed  # integers wrap at 2^64
    for shift, factor in MIXERS:
        x = (x ^ _shifted(x, shift)) * factor
    return (x ^ _shifted(x, LAST_SHIFT)) & ((1 << 63) - 1)


def random_permutation(seed: int, count: int, device: torch.device) -> Tensor:
    """Draw a permutation of [0, count): int64 [count]."""
    return random_integers(seed, count, device).argsort(stable=True)


def random_subset(seed: int, total: int, count: int, device: torch.device) -> Tensor:
    """Draw `count` of the elements [0, total): int64 [count], in work and memory of `count`.

    Each of `count` runs of equal length, to within one element, gives one of its elements; the runs begin anywhere, so
    that each element is drawn with the same probability.
    """
    edges = torch.arange(count + 1, device=device) * total // count
    start, size = edges[:-1], edges.diff()
    return (start + random_integers(seed, count, device) % size + seed % total) % total


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift the 64 bits of integers to the right, with zeros on the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
