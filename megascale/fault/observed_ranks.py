"""Ranks of torchrun or srun on this host, found by their flight records and watched without being their parent.

Only their parent learns the exit status of processes, so an end is known by the rank's error file, if the launcher's
script sets one, and else only as an end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.core.errors import Exit
from megascale.core.flight_layout import Phase
from megascale.core.flight_reader import read_flight_record
from megascale.core.flight_record import FlightRecord, FlightRecordError, flight_record_path, folder_key
from megascale.core.process import process_exists
from megascale.fault.messages import RankEnd, RankStatus
from megascale.fault.rank_ends import STORAGE_ERROR, describe_end
from megascale.fault.ranks import call_at_end, rank_status
from megascale.launch.failure import ProcessEnd, read_record

STATUS_UNKNOWN = "status_unknown"
"""The observation that only the rank's launcher knows its exit status."""


@dataclass
class _Observed:
    path: Path
    record: FlightRecord
    found: float


class ObservedRanks:
    """The ranks of the run in `folder` on this host. `on_end` is called in the event loop with each end.

    `attempt` counts the times that the launcher has started ranks again; `world`: ranks of the job, 0 before one is
    found.
    """

    def __init__(self, folder: Path, on_end: Callable[[RankEnd], None]) -> None:
        self.attempt = self.world = 0
        self.stopped = False
        self.ends: dict[int, RankEnd] = {}
        self._key = folder_key(folder)
        self._logs = folder / "logs"
        self._on_end = on_end
        self._ranks: dict[int, _Observed] = {}
        pattern = flight_record_path(folder.name, 0, 0)
        self._folder, self._pattern = pattern.parent, pattern.name.replace("-0-00000.", "-*-*.")

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks whose processes have not ended."""
        return tuple(rank for rank in self._ranks if rank not in self.ends)

    def poll(self) -> None:
        """Find ranks that have begun their records, and read the records of known ones."""
        known = {observed.path for observed in self._ranks.values()}
        for path in sorted(set(self._folder.glob(self._pattern)) - known):
            self._find(path)
        for rank in self.running:
            observed = self._ranks[rank]
            with contextlib.suppress(FlightRecordError, OSError):
                observed.record = read_flight_record(observed.path, head_only=True)
            if not process_exists(observed.record.pid):
                self._end(rank, observed)

    def _find(self, path: Path) -> None:
        """Take up the rank of a record, unless its process has ended."""
        try:
            record = read_flight_record(path, head_only=True)
        except (FlightRecordError, OSError):
            return
        if record.folder != self._key:  # of another run of this name, or of "a-b" for "a"
            return
        earlier = self._ranks.get(record.rank)
        if not process_exists(record.pid) or (earlier is not None and earlier.record.start > record.start):
            return
        if earlier is not None:  # the launcher has started the ranks again
            self.attempt += 1
            self._ranks = {rank: self._ranks[rank] for rank in self.running}
            self.ends = {}
        self.world = record.world
        observed = self._ranks[record.rank] = _Observed(path, record, time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            call_at_end(record.pid, lambda: self._end(record.rank, observed))

    def _end(self, rank: int, observed: _Observed) -> None:
        if rank in self.ends or self._ranks.get(rank) is not observed:
            return
        removed = False
        try:  # its last words, which the last poll may have missed
            observed.record = read_flight_record(observed.path, head_only=True)
        except FileNotFoundError:
            removed = True
        except (FlightRecordError, OSError):
            pass
        said, seen = None, [STATUS_UNKNOWN]
        try:
            said = read_record(self._logs, rank)
        except (OSError, ValueError):
            seen.append(STORAGE_ERROR)
        if said is not None and said["time"] >= observed.record.start:
            end = describe_end(rank, ProcessEnd(said["exit_status"], time.time()), self._logs, None)
        else:
            # a rank that ends in order removes its record, maybe before any poll has seen it done
            done = observed.record.phase == Phase.DONE or (removed and observed.record.step > 0)
            status = Exit.OK if done else Exit.UNCLASSIFIED
            end = RankEnd(rank, status, time.time(), in_order=done, patterns=tuple(seen))
        self.ends[rank] = end
        self._on_end(end)

    def statuses(self) -> tuple[RankStatus, ...]:
        """Return the states of the running ranks, as of the last `poll`."""
        found = ((rank, self._ranks[rank]) for rank in self.running)
        return tuple(rank_status(rank, one.record.pid, one.record, one.found) for rank, one in found)

    def records(self, ranks: Sequence[int] | None = None) -> dict[int, FlightRecord]:
        """Read the flight records of ranks, by default of all."""
        found = {}
        for rank in self._ranks if ranks is None else ranks:
            with contextlib.suppress(FlightRecordError, OSError, KeyError):
                found[rank] = read_flight_record(self._ranks[rank].path)
        return found

    def processes(self, ranks: Sequence[int] | None = None) -> dict[int, int]:
        """Return the process ids of running ranks, by default of all."""
        wanted = self.running if ranks is None else [rank for rank in ranks if rank in self.running]
        return {rank: self._ranks[rank].record.pid for rank in wanted}

    async def stop(self, grace_s: float, *, save: bool = False) -> tuple[int, ...]:
        """Leave the ranks alone: their launcher ends them."""
        return self.running

    def close(self) -> None:
        """Remove the records of ranks that have ended."""
        for rank in self.ends:
            self._ranks[rank].path.unlink(missing_ok=True)
