"""Progress of an attempt: its steps, and a hang as the absence of progress on every rank for too long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megascale.config.fault import FaultConfig
from megascale.record.layout import STARTING, Phase
from megascale.record.rank_state import RankStatus

STOPPED_STATES = ("T", "t")  # letters of /proc/PID/stat: stopped by a signal, or by a debugger

FIRST_STEP_TIMES = 10
"""A hang in the first step of an attempt lasts at least this multiple of the first step in earlier attempts: what the
step imports, allocates and connects takes longer on a busy host.
"""


class ProgressWatch:
    """Progress of an attempt as its heartbeats show it, at constant cost for each rank's status.

    `step`: the current step, from 1, or 0 before the first; `first_step`: the first of this attempt; `moved`: time of
    the last progress of any rank; `first_step_took`: seconds of the first step, once it is completed.

    `first_step_s`: seconds of the longest first step of these nodes in earlier attempts; infinity if a node has trained
    in none, and may have to compile. `sites_hang_s`: as in `RunConfig`.
    """

    def __init__(
        self, settings: FaultConfig, now: float, first_step_s: float = math.inf, sites_hang_s: float = math.inf
    ) -> None:
        self._settings = settings
        self._first_step_s, self._bounds = first_step_s, phase_bounds(settings, sites_hang_s)
        self._first_seen = now
        self.moved = now
        self.step = self.first_step = 0
        self.first_step_took: float | None = None

    @property
    def has_new_step(self) -> bool:
        """True once a step of this attempt has been completed."""
        return 0 < self.first_step < self.step

    def beat(self, statuses: Iterable[RankStatus], now: float) -> None:
        """Take the statuses of a node's ranks, which a heartbeat at `now` has brought."""
        for status in statuses:
            self.moved = max(self.moved, now - status.idle_s)
            if status.step > 0 and status.phase not in STARTING:
                self.step = max(self.step, status.step)
                first = status.first_step or status.step
                self._first_seen = self._first_seen if self.first_step else now
                self.first_step = first if not self.first_step else min(self.first_step, first)

        if self.has_new_step and self.first_step_took is None:
            self.first_step_took = now - self._first_seen

    def idle_s(self, now: float) -> float:
        """Return the seconds without progress on any rank."""
        return now - self.moved

    def is_idle(self, now: float) -> bool:
        """Return True if no rank has made progress for `fault.hang_s`: `hangs` knows whether that is too long."""
        return self.idle_s(now) >= self._settings.hang_s

    def hangs(self, statuses: Sequence[RankStatus], now: float) -> bool:
        """Return True if no rank has made progress for longer than its phase explains. `statuses`: of all ranks.

        The phase of a rank that waits explains nothing: it waits for a rank that does not, if there is one.
        """
        idle = self.idle_s(now)
        if not self.is_idle(now):
            return False
        if any(status.state in STOPPED_STATES and idle >= self._bound_s(status) for status in statuses):
            return True
        bounds = [self._bound_s(status) for status in [each for each in statuses if not each.waits] or statuses]
        return bool(bounds) and idle >= max(bounds)

    def _bound_s(self, status: RankStatus) -> float:
        settings = self._settings
        known_s = min(settings.start_hang_s, FIRST_STEP_TIMES * (self._first_step_s + settings.heartbeat_s))
        step_s = settings.hang_step_times * status.step_time_s if self.has_new_step else known_s
        return max(settings.hang_s, self._bounds.get(status.phase, step_s))


def phase_bounds(settings: FaultConfig, sites_hang_s: float) -> dict[str, float]:
    """Return the seconds without progress that phases other than a step explain. `sites_hang_s`: as in `RunConfig`."""
    return dict.fromkeys(("", *STARTING, Phase.PROFILE), settings.start_hang_s) | {
        Phase.EVALUATION: settings.evaluation_hang_s, Phase.SITES: sites_hang_s,
        Phase.CHECKPOINT: settings.checkpoint_hang_s, Phase.DONE: settings.checkpoint_hang_s,
    }  # fmt: skip
