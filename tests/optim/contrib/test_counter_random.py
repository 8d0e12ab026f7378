"""Random numbers as functions of seed and position, against numpy's arithmetic, and what is drawn with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megascale.optim.contrib.counter_random import random_integers, random_permutation, random_subset

CPU = torch.device("cpu")


def splitmix(seed: int, count: int) -> list[int]:
    """Return the upper bits' complement-free outputs of the published generator, in unsigned arithmetic."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return list(map(int, (z ^ (z >> np.uint64(31))) & np.uint64((1 << 63) - 1)))


@pytest.mark.parametrize("seed", [0, 1, (1 << 63) - 1])
def test_integers_are_splitmix64_s(seed: int) -> None:
    """With the published first output for the seed 0, 0xE220A8397B1DCDAF."""
    assert random_integers(seed, 100, CPU).tolist() == splitmix(seed, 100)
    assert splitmix(0, 1) == [0xE220A8397B1DCDAF & ((1 << 63) - 1)]


@pytest.mark.parametrize(("total", "count"), [(1, 1), (240, 72), (100, 100), (101, 67), (7, 1)])
def test_a_subset_has_distinct_elements(total: int, count: int) -> None:
    found = random_subset(12345, total, count, CPU).tolist()
    assert len(set(found)) == count and min(found) >= 0 and max(found) < total


def test_every_element_is_drawn_as_often() -> None:
    """Where the runs have one element or two, too."""
    times = torch.zeros(30)
    for seed in splitmix(7, 2000):
        times[random_subset(seed, 30, 20, CPU)] += 1
    assert float((times / 2000 - 20 / 30).abs().max()) < 0.05


def test_a_permutation() -> None:
    first, second = random_permutation(1, 1000, CPU), random_permutation(2, 1000, CPU)
    assert sorted(first.tolist()) == list(range(1000)) and not torch.equal(first, second)
    assert abs(float(torch.corrcoef(torch.stack([first, torch.arange(1000)]).double())[0, 1])) < 0.1
