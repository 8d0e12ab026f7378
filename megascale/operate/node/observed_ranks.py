"""Ranks of torchrun or srun on this host, found by their flight records and watched without being their parent.

Only their parent is sure to learn the exit status of processes. An observer knows it of a process that its parent has
not waited for yet, and from what the rank has said itself: in its flight record, and in the error file that its
launcher has named. Else only the end is known.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megascale.core.process import process_exists, status_of_ended
from megascale.operate.channel.messages import RankEnd
from megascale.operate.node.failure import error_file_of
from megascale.operate.node.rank_ends import describe_end
from megascale.operate.node.ranks import call_at_end, rank_status
from megascale.record.layout import Phase
from megascale.record.log_files import find_logs, folder_key
from megascale.record.log_reader import LogReader
from megascale.record.rank_state import LogError, RankState, RankStatus


@dataclass
class _Observed:
    """A rank. `log`: open, because a rank removes the file as it ends; `record`: the head when it was last read;
    `error_file`: in which the rank may write its end.
    """

    path: Path
    log: LogReader
    record: RankState
    error_file: Path | None
    found: float


class ObservedRanks:
    """The ranks of the run in `folder` on this host. `on_end` is called in the event loop with each end.

    `attempt` counts the times that the launcher has started ranks again; `world`: ranks of the job, 0 before one is
    found.
    """

    def __init__(self, folder: Path, on_end: Callable[[RankEnd], None]) -> None:
        self.attempt = self.world = 0
        self.ends: dict[int, RankEnd] = {}
        self._key = folder_key(folder)
        self._on_end = on_end
        self._ranks: dict[int, _Observed] = {}
        self._run = folder.name

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks whose processes have not ended."""
        return tuple(rank for rank in self._ranks if rank not in self.ends)

    def poll(self) -> None:
        """Find ranks that have begun their records, and read the records of known ones."""
        known = {observed.path for observed in self._ranks.values()}
        for path in sorted(set(find_logs(self._run)) - known):
            self._find(path)
        for rank in self.running:
            observed = self._ranks[rank]
            observed.record = observed.log.state(head_only=True)
            if not process_exists(observed.record.pid):
                self._end(rank, observed)

    def _find(self, path: Path) -> None:
        """Take up the rank of a record, unless its process has ended."""
        try:
            log = LogReader(path)
            record = log.state(head_only=True)
        except (LogError, OSError):
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
        observed = self._ranks[record.rank] = _Observed(
            path, log, record, error_file_of(record.pid, record.rank), time.monotonic()
        )
        with contextlib.suppress(ProcessLookupError):
            call_at_end(record.pid, lambda: self._end(record.rank, observed))

    def _end(self, rank: int, observed: _Observed) -> None:
        if rank in self.ends or self._ranks.get(rank) is not observed:
            return
        observed.record = observed.log.state(head_only=True)  # its last words, which the last poll may have missed
        record = observed.record
        status = status_of_ended(record.pid)
        status = record.exit_status if status is None else status
        end = describe_end(rank, status, time.time(), observed.error_file, since=record.start)
        done = record.phase == Phase.DONE and end.status is not None and end.status == record.exit_status
        end = replace(end, in_order=end.in_order or done, step=record.step)
        self.ends[rank] = end
        self._on_end(end)

    def statuses(self) -> tuple[RankStatus, ...]:
        """Return the states of the running ranks, as of the last `poll`."""
        found = ((rank, self._ranks[rank]) for rank in self.running)
        return tuple(rank_status(rank, one.record.pid, one.record, one.found) for rank, one in found)

    def records(self, ranks: Sequence[int] | None = None) -> dict[int, RankState]:
        """Read the flight records of ranks, by default of all."""
        found = {}
        for rank in self._ranks if ranks is None else ranks:
            with contextlib.suppress(KeyError):
                found[rank] = self._ranks[rank].log.state()
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
        for rank, observed in self._ranks.items():
            if rank in self.ends:
                observed.path.unlink(missing_ok=True)
