"""The ranks of an attempt on a node, as its agent watches them: those that it has started (`node_ranks`), or another
launcher's (`observed_ranks`).
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.core.process import process_facts
from megascale.operate.channel.messages import RankEnd
from megascale.record.log_reader import read_state
from megascale.record.rank_state import LogError, RankState, RankStatus

DRIVER_LOST = 75
"""Exit status of an agent whose driver stayed away for `fault.agent_grace_s`; EX_TEMPFAIL of sysexits.h."""


@dataclass(frozen=True)
class NodePlace:
    """The node of an agent. `address`: where other nodes reach it; `driver`: host:port of the driver; `slots`: ranks
    that it can run. `run`: which an observer watches, "" for the agent of a launched job. `folder`: on the file system
    of the run, whose space is measured. `alone`: no other process drives the job. Its ranks are started once, and rank
    0 writes to this process's output, and to no log; of ranks that it only watches the agent collects the events.
    """

    node: str
    address: str
    driver: str
    slots: int
    run: str = ""
    folder: Path = Path()
    alone: bool = False


@dataclass
class WatchedRank:
    """A rank's process. `path`: of its log, `record`: the log's head when it was last read, None before it has begun;
    `started`: of the host's monotonic clock.
    """

    pid: int
    path: Path
    started: float
    record: RankState | None


class Ranks(ABC):
    """`attempt`: its number; `world`: ranks of the job; `paths`: of the logs of ranks, by rank; `ends`: what is known
    of the ranks that have ended. `on_end` is called in the event loop with each end.
    """

    _ranks: Mapping[int, WatchedRank]

    def __init__(self, attempt: int, world: int, on_end: Callable[[RankEnd], None]) -> None:
        self.attempt = attempt
        self.world = world
        self.paths: dict[int, Path] = {}
        self.ends: dict[int, RankEnd] = {}
        self._on_end = on_end

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks of whose ends nothing is known."""
        return tuple(rank for rank in self._ranks if rank not in self.ends)

    @abstractmethod
    def poll(self) -> None:
        """Read the heads of the flight records of the running ranks."""

    def statuses(self) -> tuple[RankStatus, ...]:
        """Return the states of the running ranks, as of the last `poll`."""
        found = ((rank, self._ranks[rank]) for rank in self.running)
        return tuple(rank_status(rank, one.pid, one.record, one.started) for rank, one in found)

    @abstractmethod
    def records(self, ranks: Sequence[int] | None = None) -> dict[int, RankState]:
        """Read the flight records of ranks, by default of all, also of those that have ended."""

    def processes(self, ranks: Sequence[int] | None = None) -> dict[int, int]:
        """Return the process ids of running ranks, by default of all."""
        return {rank: self._ranks[rank].pid for rank in self.running if ranks is None or rank in ranks}

    @abstractmethod
    async def stop(self, grace_s: float, *, save: bool = False) -> tuple[int, ...]:
        """End the ranks within `grace_s` seconds, and return those that do not end even when killed."""

    @abstractmethod
    def close(self) -> None:
        """Remove what the ranks leave behind in shared memory."""

    def _add_end(self, end: RankEnd) -> None:
        self.ends[end.rank] = end
        self._on_end(end)


def read_log(path: Path, *, head_only: bool = False) -> RankState | None:
    """Read the log of a rank; None if it has not begun, or its file is damaged."""
    with contextlib.suppress(LogError, OSError):
        return read_state(path, head_only=head_only)
    return None


def rank_status(rank: int, pid: int, record: RankState | None, started: float) -> RankStatus:
    """Return the state of a rank. `record`: the head of its flight record, None before it has begun; `started`: of the
    host's monotonic clock.
    """
    (state, rss), now_ns = process_facts(pid), time.monotonic_ns()
    if record is None:
        return RankStatus(rank, pid, idle_s=now_ns / 1e9 - started, state=state, rss=rss)
    return record.status(now_ns, state, rss)
