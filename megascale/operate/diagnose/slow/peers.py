"""The comparison of ranks with their peers: medians, and deviations of means from them.

Peers do the same work, such as the ranks of one pipeline stage. Statistics are robust: a few slow peers move neither
the median nor the deviation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megascale.operate.diagnose.slow.step_cube import Floats, StepCube

MAD_TO_DEVIATION = 1.4826
"""Standard deviations of a normal distribution in a median absolute deviation."""

MIN_SCORE = 5.0
"""Deviations beyond the median: of 12,288 healthy ranks with Gaussian noise none in 99.6% of all windows."""

BLOCKS, PERSISTENT_BLOCKS = 5, 4
"""Blocks of a window, and blocks in which what lasts shows."""

ERROR_BLOCKS = 10
"""Blocks of a window whose means give its standard error."""

NOISE_FLOOR = 0.005
"""Smallest deviation of a mean, as a share of the median: below, differences say nothing about a machine."""


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


class PeerComparison(NamedTuple):
    """Means of a window beside the peers' median, and the deviation of the mean, each [R, C]."""

    seconds: Floats
    peer_s: Floats
    deviation: Floats

    @property
    def score(self) -> Floats:
        return (self.seconds - self.peer_s) / self.deviation


def compare(cube: StepCube, values: Floats) -> PeerComparison:
    """Compare the means of `values` [R, S, C] with the medians of peers: ranks of the same pipeline stage.

    Of an even number of peers the lower median counts. The deviation is the largest of: the MAD of the peers' means;
    the standard error of a peer's difference to the others, from means of blocks of steps, which depend less on each
    other than steps do; the noise floor. What makes steps longer for all peers, such as uneven work, is no error.
    """
    seconds = cube.mean(values)
    blocks = np.array_split(np.arange(len(cube.steps)), min(ERROR_BLOCKS, max(1, len(cube.steps))))
    means = np.stack([cube.take(block).mean(values[:, block]) for block in blocks], 1)  # [R, block, C]
    peer_s, mad, spread = np.empty_like(seconds), np.empty_like(seconds), np.zeros_like(seconds)
    stage = cube.places.coords["pp"]
    for at in np.unique(stage):
        mine = stage == at
        peer_s[mine] = lower_median(seconds[mine])
        mad[mine] = MAD_TO_DEVIATION * lower_median(np.abs(seconds[mine] - peer_s[mine]))
        others = means[mine][::-1] if mine.sum() == 2 else lower_median(means[mine])
        if len(blocks) > 1:
            spread[mine] = lower_median(_standard_error(means[mine] - others))
    floor = np.maximum(NOISE_FLOOR * np.abs(peer_s), 1e-4 * cube.step_s + 1e-12)
    return PeerComparison(seconds, peer_s, np.fmax(np.fmax(mad, spread), floor))


def _standard_error(means: Floats) -> Floats:
    """Return the standard error of the mean of blocks [R, block, C] that are known; NaN for fewer than two."""
    known = ~np.isnan(means)
    count = known.sum(1)
    mean = np.where(known, means, 0.0).sum(1) / np.maximum(1, count)
    squares = np.where(known, (means - mean[:, None]) ** 2, 0.0).sum(1)
    return np.asarray(np.sqrt(squares / np.where(count > 1, (count - 1) * count, np.nan)))
