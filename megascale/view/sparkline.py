"""A curve as a line of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.-=^"


def sparkline(values: np.ndarray, width: int, levels: Sequence[str] = BLOCKS) -> str:
    """Draw finite values as `width` characters at most, the mean of equally many values each, from the lowest to the
    highest level.
    """
    values = values[np.isfinite(values)]
    if not len(values) or width < 1:
        return ""
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    low, span = means.min(), np.ptp(means)
    heights = (means - low) / span * (len(levels) - 1) if span > 0 else np.zeros(len(means))
    return "".join(levels[round(height)] for height in heights)
