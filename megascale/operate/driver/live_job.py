"""The live file of a job with a driver: written by a thread, from what the heartbeats of all nodes have brought."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from megascale.operate.driver.job import Job
from megascale.operate.node.threads import call_in_thread
from megascale.operate.print_line import print_line
from megascale.record.layout import Phase
from megascale.record.live_file import EVERY_S, LiveFile, LiveState
from megascale.record.rank_state import RankStatus

FINISH_S = 1.0
"""Seconds that the end of the job waits for a file server."""


def live_state(job: Job, now: float) -> LiveState:
    """Return the present state of all ranks."""
    attempt = job.attempt
    ranks = [RankStatus(rank, 0) for rank in range(job.plan.world if attempt is None else attempt.world)]
    for node, on_node in attempt.placement.items() if attempt is not None else ():
        member = job.roster.members.get(node)
        for rank in on_node:
            if member is None:  # lost
                ranks[rank] = RankStatus(rank, 0, state="X")
            elif (status := member.statuses.get(rank)) is not None:
                age_s = now - member.heard
                ranks[rank] = status._replace(idle_s=status.idle_s + age_s, silent_s=status.silent_s + age_s)
    for number, end in attempt.ends.items() if attempt is not None else ():
        last = ranks[number]
        last = last._replace(step=max(last.step, end.step or -1))  # its last status may be gone
        ranks[number] = last._replace(phase=str(Phase.DONE)) if end.in_order else last._replace(state="X")
    stage = "" if job.plan.alone else str(job.stage)
    return LiveState(now, job.history.attempt, ranks, stage, job.history.ended)


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
