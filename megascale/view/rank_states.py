"""The present states of a run's ranks: from the live file, or from the flight records on this host.

The live file has every rank, and works over a shared folder. Without one, as under torchrun, the flight records of the
ranks on this host are read.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megascale.core.flight_reader import read_flight_record
from megascale.core.flight_record import SHARED_MEMORY, FlightRecord, FlightRecordError
from megascale.core.live_file import LIVE_FILE, SHOWN_STATES, LiveRank, LiveState, read_live_file
from megascale.core.process import process_state
from megascale.fault.alerts import METRICS_FILE

STALE_S = 10.0
"""Seconds after the time of the next write from which a live file is said to be stale."""

NEAR_STEPS = 2
"""Steps by which a flight record may be ahead of the live file; a record of another run of the same name is further."""


@dataclass(frozen=True)
class RankStates:
    """The states of ranks, by rank, `age_s` seconds before `read_s`, a time of the monotonic clock. `source`: "live
    file" or "flight records", "" for neither.

    `stage` and `status`: of the live file. `stale`: nobody writes the live file any more, and the job has not ended.
    """

    ranks: Sequence[LiveRank]
    age_s: float = 0.0
    attempt: int = 0
    source: str = ""
    stage: str = ""
    status: int | None = None
    stale: bool = False
    read_s: float = field(default_factory=time.monotonic, compare=False)

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

    def read(self, run: str, is_ours: Callable[[FlightRecord], bool] = lambda record: True) -> RankStates:
        """Return the states now. `is_ours`: of a flight record of that name, False for another run's.

        Raises: ValueError for a live file of another kind; OSError
        """
        live, found = read_live_file(self._folder / LIVE_FILE), RankStates(())
        if live is not None and not self._is_of_an_earlier_run(live):
            found = _from_live_file(live, self._age_s(live))
            if found.status is None and not found.stale:
                return found
        records = local_records(run, is_ours)
        if not records:
            return found
        world = next(iter(records.values())).world
        ranks = [_live_rank(records[rank]) if rank in records else LiveRank() for rank in range(world)]
        return RankStates(ranks, attempt=max(r.attempt for r in records.values()), source="flight records")

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


def records_of(run: str, states: RankStates) -> dict[int, FlightRecord]:
    """Return the flight records on this host that agree with what is known of a run's ranks."""
    known, elapsed_s = states.ranks, states.age_s + time.monotonic() - states.read_s

    def agrees(record: FlightRecord) -> bool:
        if record.world != len(known):
            return False
        since = elapsed_s / record.step_time_s if record.step_time_s else 0.0
        return -NEAR_STEPS <= record.step - known[record.rank].step <= NEAR_STEPS + since

    return local_records(run, agrees)


def local_records(run: str, is_ours: Callable[[FlightRecord], bool] = lambda record: True) -> dict[int, FlightRecord]:
    """Return the flight records of the ranks of a run that live on this host, by rank. `is_ours`: False for a record of
    another job of that name. If two records of a rank may both be the run's, neither is returned.
    """
    found: dict[int, FlightRecord] = {}
    ambiguous: set[int] = set()
    for path in SHARED_MEMORY.glob(f"megascale-{os.geteuid()}-*.flight"):
        with contextlib.suppress(OSError, FlightRecordError):
            if path.lstat().st_uid != os.geteuid():
                continue
            record = read_flight_record(path)
            if record.run != run or not 0 <= record.rank < record.world or not is_ours(record):
                continue
            if process_state(record.pid) != "Z":
                ambiguous |= {record.rank} & found.keys()
                found[record.rank] = record
    return {rank: record for rank, record in found.items() if rank not in ambiguous}


def _live_rank(record: FlightRecord) -> LiveRank:
    state = ""
    with contextlib.suppress(OSError):
        state = process_state(record.pid)
    shown = state if state in SHOWN_STATES else ""
    return LiveRank(str(record.phase), record.step, int(record.idle_s), int(record.silent_s), shown)
