"""The cost of failures to a long job.

With M seconds between failures, c seconds to save a checkpoint and r to restart, a job with a checkpoint every t
seconds loses c / t + (r + t / 2) / M of its time, least at t = sqrt(2 c M) (Young 1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DEVICE_HOURS = 50_000.0
"""Mean hours between failures of a device: 16,384 devices, 419 interruptions in 54 days (Llama team 2024, 3.3.4)."""

SAVE_S = 5.0
RESTART_S = 900.0
"""Seconds of training paused by a two-stage save, and from a failure to the next step (MegaScale, 6.3)."""


@dataclass(frozen=True)
class FailureCost:
    """Time lost to failures. `mean_s`: seconds between failures; `every_s`: best checkpoint interval."""

    mean_s: float
    every_s: float
    lost_share: float

    def with_failures(self, seconds: float) -> float:
        """Convert seconds of training without failures to seconds with failures."""
        return seconds / (1 - self.lost_share) if self.lost_share < 1 else math.inf


def failure_cost(
    devices: int, device_hours: float = DEVICE_HOURS, save_s: float = SAVE_S, restart_s: float = RESTART_S
) -> FailureCost:
    """Estimate the losses of a job with independent device failures, every `device_hours` on average per device."""
    mean = device_hours * 3600 / devices
    every = math.sqrt(2 * save_s * mean)
    return FailureCost(mean, every, min(1.0, save_s / every + (restart_s + every / 2) / mean))
