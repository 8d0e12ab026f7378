"""Statistics of ranks, nodes or groups that do the same work: a few slow ones move neither median nor deviation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megascale.operate.diagnose.slow.step_cube import Floats, Integers

MAD_TO_DEVIATION = 1.4826  # standard deviations of a normal distribution in a median absolute deviation
MIN_SCORE = 5.0  # deviations beyond the median: of 12,288 healthy ranks with Gaussian noise none in 99.6% of windows
BLOCKS, PERSISTENT_BLOCKS = 5, 4  # blocks of a window, and blocks in which what lasts shows


def lower_median(values: Floats) -> Floats:
    """Return the median over the first dimension of the values that are known, not NaN; of an even number of values the
    lower one, so that of two ranks the slower one differs.
    """
    if np.isnan(values).any():  # NaN come last
        middle = np.maximum(0, (~np.isnan(values)).sum(0) - 1) // 2
        return np.asarray(np.take_along_axis(np.sort(values, 0), np.asarray(middle)[None], 0)[0])
    middle = (len(values) - 1) // 2
    return np.asarray(np.partition(values, middle, 0)[middle])


def deviation_of(apart: Floats) -> float:
    """Return the standard deviation of a normal distribution with such differences from its middle."""
    return MAD_TO_DEVIATION * float(lower_median(np.abs(apart)))


class Groups(NamedTuple):
    """Rows in groups: their positions in the `order` of the groups, which begin at `starts` in it."""

    order: Integers
    starts: Integers

    @classmethod
    def of(cls, code: Integers) -> Groups:
        """Put the rows with equal codes into a group."""
        order = np.argsort(code, kind="stable")
        return cls(order, np.flatnonzero(np.diff(code[order], prepend=-1)))

    @property
    def sizes(self) -> Integers:
        """The numbers of rows, [groups]."""
        return np.diff(self.starts, append=len(self.order))

    @property
    def members(self) -> list[Integers]:
        """The positions of each group's rows."""
        return np.split(self.order, self.starts[1:]) if len(self.starts) else []

    def reduce(self, ufunc: np.ufunc, values: Floats) -> Floats:
        """Reduce the rows of each group to one, [groups, ...]."""
        return np.asarray(ufunc.reduceat(values[self.order], self.starts))


def peer_median(values: Floats, code: Integers) -> Floats:
    """Return the lower median of each row's peers, the rows with its code."""
    median = np.empty_like(values)
    for peers in Groups.of(code).members:
        median[peers] = lower_median(values[peers])
    return median
