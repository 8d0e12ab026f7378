"""The live file of a job with a driver: written by a thread, from what the heartbeats of all nodes have brought."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from megascale.operate.channel.messages import RankStatus
from megascale.operate.driver.job import Job
from megascale.operate.node.threads import call_in_thread
from megascale.operate.print_line import print_line
from megascale.record.layout import Phase
from megascale.record.live_file import EVERY_S, SHOWN_STATES, LiveFile, LiveRank, LiveState

FINISH_S = 1.0
"""Seconds that the end of the job waits for a file server."""


def live_state(job: Job, now: float) -> LiveState:
    """Return the present state of all ranks."""
    attempt = job.attempt
    ranks = [LiveRank()] * (job.plan.world if attempt is None else attempt.world)
    for node, on_node in attempt.placement.items() if attempt is not None else ():
        member = job.roster.members.get(node)
        for rank in on_node:
            if member is None:  # lost
                ranks[rank] = LiveRank(state="X")
            elif (status := member.statuses.get(rank)) is not None:
                ranks[rank] = _live_rank(status, now - member.heard)
    for number, end in attempt.ends.items() if attempt is not None else ():
        last = ranks[number]
        ranks[number] = last._replace(phase=str(Phase.DONE)) if end.in_order else last._replace(state="X")
    return LiveState(now, job.history.attempt, ranks, str(job.stage), job.history.ended)


def _live_rank(status: RankStatus, age_s: float) -> LiveRank:
    """Return the state of a rank as its agent has seen it `age_s` seconds ago."""
    state = status.state if status.state in SHOWN_STATES else ""
    return LiveRank(status.phase, status.step, int(status.idle_s + age_s), int(status.silent_s + age_s), state)


class LiveWriter:
    """Writes the live file. The driver waits for no write but the last."""

    def __init__(self, file: LiveFile) -> None:
        self._file = file
        self._fails = False

    async def run(self, job: Job, clock: Callable[[], float]) -> None:
        """Write the state of a job until cancelled."""
        while True:
            await asyncio.sleep(await self._write(live_state(job, clock()), None))

    async def finish(self, job: Job, now: float) -> None:
        """Write the state of a job that has ended."""
        with contextlib.suppress(TimeoutError):
            await self._write(live_state(job, now), FINISH_S)

    async def _write(self, state: LiveState, timeout_s: float | None) -> float:
        """Write a state, and return the seconds until the next. Raises: TimeoutError"""
        try:
            pause_s = await call_in_thread(lambda: self._file.write(state), timeout_s)
        except TimeoutError:
            raise
        except (OSError, RuntimeError) as error:  # the job is more important than its picture
            if not self._fails:
                print_line(f"WARNING: the live file cannot be written: {error}")
            self._fails = True
            return EVERY_S
        self._fails = False
        return pause_s
