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
from megascale.operate.node.rank_ends import describe_end, error_file_of
from megascale.operate.node.ranks import Ranks, WatchedRank
from megascale.operate.node.threads import call_at_end
from megascale.record.layout import Phase
from megascale.record.log_files import find_logs, folder_key, remove_log
from megascale.record.log_reader import LogReader
from megascale.record.rank_state import LogError, RankState


@dataclass
class _Observed(WatchedRank):
    """`log`: open, because a rank may remove the file as it ends; `error_file`: in which it may write its end."""

    record: RankState
    log: LogReader
    error_file: Path | None

    def read(self) -> RankState:
        """Return the newest record."""
        self.record = self.log.state(head_only=True)
        return self.record


class ObservedRanks(Ranks):
    """The ranks of the run in `folder` on this host. `attempt` counts the times that the launcher has started ranks
    again; `world`: 0 before one is found. `collected`: nobody but this process removes their logs.
    """

    def __init__(self, folder: Path, on_end: Callable[[RankEnd], None], *, collected: bool = False) -> None:
        super().__init__(0, 0, on_end)
        self._key = folder_key(folder)
        self._collected = collected
        self._ranks: dict[int, _Observed] = {}
        self._run = folder.name

    def poll(self) -> None:
        """Find ranks that have begun their records, and read the records of known ones."""
        known = {observed.path for observed in self._ranks.values()}
        for path in sorted(set(find_logs(self._run)) - known):
            self._find(path)
        for rank in self.running:
            observed = self._ranks[rank]
            observed.read()
            if not process_exists(observed.pid):
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
        pid, rank, earlier = record.pid, record.rank, self._ranks.get(record.rank)
        if not process_exists(pid) or (earlier is not None and earlier.record.start > record.start):
            return
        if earlier is not None:  # the launcher has started the ranks again
            self.attempt += 1
            self._ranks = {rank: self._ranks[rank] for rank in self.running}
            self.ends = {}
        self.world = record.world
        observed = _Observed(pid, path, time.monotonic(), record, log, error_file_of(pid, rank))
        self._ranks[rank], self.paths[rank] = observed, path
        with contextlib.suppress(OSError):  # `poll` sees the end later
            call_at_end(pid, lambda: self._end(rank, observed))

    def _end(self, rank: int, observed: _Observed) -> None:
        if rank in self.ends or self._ranks.get(rank) is not observed:
            return
        record = observed.read()  # its last words, which `poll` may have missed
        status = status_of_ended(observed.pid)
        status = record.exit_status if status is None else status
        end = describe_end(rank, status, time.time(), observed.error_file, since=record.start)
        done = record.phase == Phase.DONE and end.status is not None and end.status == record.exit_status
        self._add_end(replace(end, in_order=end.in_order or done, step=record.step))

    def records(self, ranks: Sequence[int] | None = None) -> dict[int, RankState]:
        wanted = self._ranks if ranks is None else ranks
        return {rank: self._ranks[rank].log.state() for rank in wanted if rank in self._ranks}

    async def stop(self, grace_s: float, *, save: bool = False) -> tuple[int, ...]:
        """Leave the ranks alone: their launcher ends them."""
        return self.running

    def close(self) -> None:
        """Remove the records of ranks that have ended; those of collected ranks at once."""
        for rank, path in self.paths.items():
            if self._collected or rank in self.ends:
                remove_log(path)
