"""The time that a step should take by its work, and the steps that take longer (ResiHP, arXiv 2605.06374).

Packed sequences make healthy steps vary: T = a N + b sum(l^2) for N tokens in sequences of l. The model FLOPs of a step
are such a sum themselves, so tokens and FLOPs, which every step records, predict as well as tokens and squared lengths.
"""

from __future__ import annotations

import numpy as np

from megascale.operate.diagnose.slow.step_cube import Booleans, Floats

MAX_EXCESS = 0.25
"""Largest share by which an ordinary step exceeds its prediction."""

ROUNDS = 3
"""Fits, each without the steps that the last one calls slow."""


def predict_seconds(tokens: Floats, squares: Floats, seconds: Floats, ordinary: Booleans) -> Floats:
    """Return the predicted seconds of steps [S], fitted on the ordinary ones.

    `squares`: the sum of squared lengths, or the FLOPs. The fit starts at the steps' median time per token.
    """
    work = np.stack([tokens, squares], 1).astype(np.float64)
    work /= np.maximum(work.max(0, initial=0.0), 1e-300)
    usable = ordinary & (seconds > 0) & (work[:, 0] > 0)
    if not usable.any():
        return np.array(seconds, np.float64)
    predicted = work[:, 0] * np.median(seconds[usable] / work[usable, 0])
    for _ in range(ROUNDS):
        fitted = usable & (seconds <= (1 + MAX_EXCESS) * predicted)
        if fitted.sum() < 2:
            break
        factors = np.linalg.lstsq(work[fitted], seconds[fitted], rcond=1e-3)[0]  # equal columns share the time
        if (factors < 0).any():
            factors = np.array([np.median(seconds[fitted] / work[fitted, 0]), 0.0])
        predicted = work @ factors
    return predicted


def slow_steps(tokens: Floats, squares: Floats, seconds: Floats, ordinary: Booleans) -> Booleans:
    """Return which ordinary steps exceed their prediction by MAX_EXCESS."""
    return ordinary & (seconds > (1 + MAX_EXCESS) * predict_seconds(tokens, squares, seconds, ordinary))
