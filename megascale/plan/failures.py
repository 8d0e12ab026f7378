"""What failures cost a long job.

With a mean time M between failures of the whole job, c seconds that training stands still for a checkpoint and r from a
failure to the first new step, a job that saves every t seconds loses c / t to saving, and at each failure r and on
average t / 2 of work: least at t = sqrt(2 c M) (Young 1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DEVICE_HOURS = 50_000.0
"""Between failures of one device: 16,384 of them, 419 interruptions in 54 days (Llama team 2024, 3.3.4)."""

SAVE_S = 5.0
RESTART_S = 900.0
"""Training stands still for a save in two stages; from a failure to the next step 15 minutes (MegaScale, 6.3)."""


@dataclass(frozen=True)
class Losses:
    """`mean_s`: between failures of the job; `every_s`: the best time between checkpoints; `share` of all time that is
    lost, in [0, 1].
    """

    mean_s: float
    every_s: float
    share: float

    def stretched(self, seconds: float) -> float:
        """How long so much training takes."""
        return seconds / (1 - self.share) if self.share < 1 else math.inf


def losses(
    devices: int, device_hours: float = DEVICE_HOURS, save_s: float = SAVE_S, restart_s: float = RESTART_S
) -> Losses:
    """Of a job whose devices fail one by one, each after so many hours on average."""
    mean = device_hours * 3600 / devices
    every = math.sqrt(2 * save_s * mean)
    return Losses(mean, every, min(1.0, save_s / every + (restart_s + every / 2) / mean))
