"""The ranks of an attempt on a node, as an agent watches them: those that it started, or another launcher's."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from megascale.core.process import process_facts
from megascale.operate.channel.messages import RankEnd
from megascale.record.rank_state import RankState, RankStatus


class Ranks(Protocol):
    """`attempt`: its number; `world`: ranks of the job; `ends`: what is known of the ranks that have ended, by rank."""

    attempt: int
    world: int
    ends: dict[int, RankEnd]

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks whose processes have not ended."""

    def poll(self) -> None:
        """Read the heads of the flight records of the running ranks."""

    def statuses(self) -> tuple[RankStatus, ...]:
        """Return the states of the running ranks, as of the last `poll`."""

    def records(self, ranks: Sequence[int] | None = None) -> dict[int, RankState]:
        """Read the flight records of ranks, by default of all, also of those that have ended."""

    def processes(self, ranks: Sequence[int] | None = None) -> dict[int, int]:
        """Return the process ids of running ranks, by default of all."""

    async def stop(self, grace_s: float, *, save: bool = False) -> tuple[int, ...]:
        """End the ranks within `grace_s` seconds, and return those that do not end even when killed."""

    def close(self) -> None:
        """Remove what the ranks leave behind in shared memory."""


def rank_status(rank: int, pid: int, record: RankState | None, started: float) -> RankStatus:
    """Return the state of a rank. `record`: the head of its flight record, None before it has begun; `started`: of the
    host's monotonic clock.
    """
    (state, rss), now_ns = process_facts(pid), time.monotonic_ns()
    if record is None:
        return RankStatus(rank, pid, idle_s=now_ns / 1e9 - started, state=state, rss=rss)
    return record.status(now_ns, state, rss)


def call_at_end(pid: int, ended: Callable[[], None]) -> None:
    """Have the event loop call `ended` as soon as a process has ended; never on a kernel without pidfd.

    Raises: ProcessLookupError
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return
    loop = asyncio.get_running_loop()

    def take() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        ended()

    loop.add_reader(descriptor, take)
