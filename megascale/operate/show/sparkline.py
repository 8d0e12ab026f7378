"""A curve as text: a line, or several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.-=^"


def bars(values: np.ndarray, width: int, rows: int, levels: Sequence[str] = BLOCKS) -> list[str]:
    """Draw finite values, from the lowest to the highest level, as bars over `rows` lines of `width` characters: each
    bar is the mean of equally many values, or of several one value. Without values the lines are empty.
    """
    values = values[np.isfinite(values)]
    if not len(values) or width < 1:
        return [""] * rows
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    means = means[np.arange(width) * len(means) // width]
    low, span = means.min(), np.ptp(means)
    heights = [round(height) for height in (means - low) / (span or 1.0) * (rows * len(levels) - 1)]
    full = levels[-1] if levels == BLOCKS else "|"
    return [
        "".join(
            " " if height < base else full if height >= base + len(levels) else levels[height - base]
            for height in heights
        )
        for base in range((rows - 1) * len(levels), -1, -len(levels))
    ]
