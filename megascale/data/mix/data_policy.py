"""Data policies: what changes the weights of a blend's datasets during training (`data.policy`). No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class DataReport:
    """The datasets in the steps since the last update, up to `step`: shares of the samples (`weights`), mean losses per
    token (`losses`), NaN for a dataset without tokens and for a policy that uses no losses, and the number of `tokens`
    with a label in the loss; all [datasets], f64.
    """

    step: int
    weights: np.ndarray
    losses: np.ndarray
    tokens: np.ndarray


class DataPolicy(Protocol):
    """Built once with the configured weights [datasets] of `data.train`, which add up to 1. Rank 0 asks it; a run that
    resumes gives back `state`, so that all else must follow from its arguments.
    """

    state: np.ndarray
    """All that the policy remembers: f64, of a fixed length; saved in every checkpoint."""

    def __init__(self, weights: np.ndarray) -> None: ...

    def update(self, report: DataReport) -> np.ndarray:
        """Return new weights of the datasets, 0 or above, of any sum above 0."""


class Fixed:
    """Leaves the weights as they are: a run reads the samples that it reads without a policy."""

    def __init__(self, weights: np.ndarray) -> None:
        self.state = np.zeros(0)

    def update(self, report: DataReport) -> np.ndarray:
        return report.weights
