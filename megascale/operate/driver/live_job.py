"""The live file of a job with a driver: written by a thread, from what the heartbeats of all nodes have brought."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from megascale.core.outages import Outages
from megascale.operate.driver.job import Job
from megascale.operate.node.threads import call_in_thread
from megascale.operate.print_line import print_line
from megascale.record.layout import Phase
from megascale.record.live_file import EVERY_S, LIVE_FILE, LiveFile, LiveState
from megascale.record.rank_state import RankStatus

FINISH_S = 1.0  # seconds that the end of the job waits for a file server


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


@contextlib.asynccontextmanager
async def writing_live_file(job: Job, clock: Callable[[], float]) -> AsyncIterator[None]:
    """Write the live file of a job during the block, and its last state at the end. Only that write is waited for."""
    file, outages = LiveFile(Path(job.plan.folder) / LIVE_FILE), Outages()

    async def write(timeout_s: float | None) -> float:
        """Write the present state, and return the seconds until the next write. Raises: TimeoutError"""
        state = live_state(job, clock())
        try:
            pause_s = await call_in_thread(lambda: file.write(state), timeout_s)
        except TimeoutError:
            raise
        except (OSError, RuntimeError) as error:  # the job is more important than its picture
            if outages.begins("live"):
                print_line(f"WARNING: the live file cannot be written: {error}")
            return EVERY_S
        outages.ends("live")
        return pause_s

    async def go_on() -> None:
        while True:
            await asyncio.sleep(await write(None))

    writing = asyncio.ensure_future(go_on())
    try:
        yield
        with contextlib.suppress(TimeoutError):
            await write(FINISH_S)
    finally:
        writing.cancel()
        await asyncio.wait([writing])
        if not writing.cancelled():
            writing.result()  # raises what ended it
