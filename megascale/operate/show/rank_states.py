"""The present states of a run's ranks: from the live file, or from the flight records on this host.

The live file has every rank, and works over a shared folder. Without one, as under torchrun, the flight records of the
ranks on this host are read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.core.process import process_state
from megascale.operate.driver.alerts import METRICS_FILE
from megascale.record.live_file import LIVE_FILE, LiveRank, LiveState, live_rank, read_live_file
from megascale.record.log_files import local_states

IDLE_S = 10.0
"""Seconds without progress that are no news."""

STALE_S = 10.0
"""Seconds after the time of the next write from which a live file is said to be stale."""


@dataclass(frozen=True)
class RankStates:
    """The states of ranks, by rank, `age_s` seconds ago. `source`: "live file" or "flight records", "" for neither.

    `stage` and `status`: of the live file. `stale`: nobody writes the live file any more, and the job has not ended.
    """

    ranks: Sequence[LiveRank]
    age_s: float = 0.0
    attempt: int = 0
    source: str = ""
    stage: str = ""
    status: int | None = None
    stale: bool = False

    @property
    def step(self) -> int:
        """The newest step of any rank; 0 before the first."""
        return max((rank.step for rank in self.ranks), default=0)

    @property
    def idle_s(self) -> int:
        """Seconds for which no rank has made progress. A rank that is done makes none."""
        working = [rank.idle_s for rank in self.ranks if rank.phase and rank.phase != "done"]
        return min(working, default=0)


class RankStatesReader:
    """Reads the states of the ranks of a run, again and again. The clock of the host that writes may differ: a file
    whose time advances between two reads is as old as the change.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._written = self._changed = -1.0

    def read(self) -> RankStates:
        """Return the states now. Raises: ValueError for a live file of another kind; OSError"""
        live, found = read_live_file(self._folder / LIVE_FILE), RankStates(())
        if live is not None and not self._is_of_an_earlier_run(live):
            found = _from_live_file(live, self._age_s(live))
            if found.status is None and not found.stale:
                return found
        states = local_states(self._folder)
        if not states:
            return found
        world = next(iter(states.values())).world
        ranks = [live_rank(states[n], _letter(states[n].pid)) if n in states else LiveRank() for n in range(world)]
        return RankStates(ranks, attempt=max(state.attempt for state in states.values()), source="flight records")

    def _age_s(self, live: LiveState) -> float:
        now = self._clock()
        if live.time != self._written:
            self._changed = now if self._written >= 0 else -1.0
            self._written = live.time
        since = now - self._changed if self._changed >= 0 else math.inf
        return min(since, max(0.0, now - live.time))

    def _is_of_an_earlier_run(self, live: LiveState) -> bool:
        """Return True if metrics were written long after the end of the job that wrote the file."""
        try:
            written = (self._folder / METRICS_FILE).stat().st_mtime
        except OSError:
            return False
        return live.status is not None and written > live.time + STALE_S


def _from_live_file(live: LiveState, age_s: float) -> RankStates:
    stale = live.status is None and age_s > live.next_s + STALE_S
    return RankStates(live.ranks, age_s, live.attempt, "live file", live.stage, live.status, stale)


def _letter(pid: int) -> str:
    try:
        return process_state(pid)
    except OSError:
        return ""
