"""The present states of a run's ranks: from the live file, or from the flight records on this host.

The live file has every rank, and works over a shared folder. Without one, as under torchrun, the flight records of the
ranks on this host are read.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megascale.core.process import process_state
from megascale.core.run_folder import METRICS_FILE
from megascale.record.live_file import LIVE_FILE, LiveState, read_live_file
from megascale.record.log_files import local_states
from megascale.record.rank_state import RankStatus

STALE_S = 10.0  # seconds after the time of the next write from which a live file is said to be stale


class LiveStateReader:
    """Reads the states of the ranks of a run, again and again. The clock of the host that writes may differ: a file
    whose time advances between two reads is as old as the change.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._written = self._changed = -1.0

    def read(self) -> LiveState:
        """Return the states now. Raises: ValueError for a live file of another kind; OSError"""
        live, found = read_live_file(self._folder / LIVE_FILE), LiveState(0.0, 0, ())
        if live is not None and not self._is_of_an_earlier_run(live):
            age_s = self._age_s(live)
            found = replace(live, age_s=age_s, stale=live.status is None and age_s > live.next_s + STALE_S)
            if found.status is None and not found.stale:
                return found
        states = local_states(self._folder)
        if not states:
            return found
        ranks = [RankStatus(rank, 0) for rank in range(max(states.values(), key=lambda state: state.attempt).world)]
        for rank, state in states.items():
            if rank >= len(ranks):  # of an earlier attempt with more ranks
                continue
            ranks[rank] = state.status(state.read_ns)
            with contextlib.suppress(OSError):
                ranks[rank] = ranks[rank]._replace(state=process_state(state.pid))
        attempt = max(state.attempt for state in states.values())
        return LiveState(self._clock(), attempt, ranks, source="flight records")

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
