"""Measured seconds explained by what they are for: least squares with costs that are never negative."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """Something measured some times. `amounts`: how much of each thing it took, such as calls, FLOPs and bytes;
    `known`: seconds of it that are explained already.
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]
    known: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """The slowest measurement over the quickest."""
        return max(self.seconds) / min(self.seconds)


def costs(samples: Sequence[Sample]) -> tuple[float, ...]:
    """Seconds of one of each thing: those with which the samples' relative errors have the least squares. A cost that
    would be negative is 0.
    """
    weights = torch.tensor([1 / sample.median for sample in samples], dtype=torch.float64)
    amounts = torch.tensor([sample.amounts for sample in samples], dtype=torch.float64) * weights[:, None]
    scale = amounts.abs().amax(0).clamp_min(torch.finfo(torch.float64).tiny)  # FLOPs and calls are worlds apart
    left = list(range(amounts.shape[1]))
    found = torch.zeros(amounts.shape[1], dtype=torch.float64)
    wanted = torch.tensor([[1 - sample.known / sample.median] for sample in samples], dtype=torch.float64)
    while left:
        columns = amounts[:, left] / scale[left]
        solved = torch.linalg.lstsq(columns, wanted, driver="gelsd").solution
        least = int(solved[:, 0].argmin())
        if solved[least, 0] >= 0:
            found[left] = solved[:, 0] / scale[left]
            break
        del left[least]
    return tuple(found.tolist())


def rate(cost: float) -> float:
    """So many of a thing a second; where no cost was found more than anything does."""
    return 1 / cost if cost else 1e15


def error(samples: Sequence[Sample], found: Sequence[float]) -> float:
    """The mean relative error of what costs say of samples."""
    said = [each.known + sum(c * a for c, a in zip(found, each.amounts, strict=True)) for each in samples]
    return statistics.mean(abs(value / each.median - 1) for value, each in zip(said, samples, strict=True))
