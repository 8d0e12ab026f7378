"""Non-negative least squares: fits a cost per call, FLOP or byte to measured seconds.

seconds_i ~ explained_i + sum_j cost_j * amount_ij,  cost_j >= 0
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Measurement:
    """Repeated timings of one piece of work. `amounts`: its calls, FLOPs, bytes and the like; `explained_s`: seconds
    attributed already.
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]
    explained_s: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Slowest timing divided by the fastest."""
        return max(self.seconds) / min(self.seconds)


def fit_costs(samples: Sequence[Measurement]) -> tuple[float, ...]:
    """Fit the seconds per unit of each amount, with least squares of the relative errors. A cost is never negative."""
    weights = torch.tensor([1 / sample.median for sample in samples], dtype=torch.float64)
    amounts = torch.tensor([sample.amounts for sample in samples], dtype=torch.float64) * weights[:, None]
    # FLOPs and calls differ by many orders of magnitude
    scale = amounts.abs().amax(0).clamp_min(torch.finfo(torch.float64).tiny)
    active = list(range(amounts.shape[1]))
    result = torch.zeros(amounts.shape[1], dtype=torch.float64)
    target = torch.tensor([[1 - sample.explained_s / sample.median] for sample in samples], dtype=torch.float64)
    while active:
        columns = amounts[:, active] / scale[active]
        solved = torch.linalg.lstsq(columns, target, driver="gelsd").solution
        lowest = int(solved[:, 0].argmin())
        if solved[lowest, 0] >= 0:
            result[active] = solved[:, 0] / scale[active]
            break
        del active[lowest]
    return tuple(result.tolist())


def rate_of_cost(cost: float) -> float:
    """Convert seconds per unit to units per second; for a cost of 0, a rate above any hardware's."""
    return 1 / cost if cost else 1e15


def mean_relative_error(samples: Sequence[Measurement], fitted: Sequence[float]) -> float:
    """Mean relative error of the fitted costs' predictions."""
    predicted = [s.explained_s + sum(c * a for c, a in zip(fitted, s.amounts, strict=True)) for s in samples]
    return statistics.mean(abs(value / sample.median - 1) for value, sample in zip(predicted, samples, strict=True))
