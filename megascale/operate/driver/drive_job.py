"""Run the driver of a job to its end: of a job of `megascale launch`, or of one that is only watched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.core.errors import Exit
from megascale.operate.driver.commands import Log
from megascale.operate.driver.driver import Clock, Driver
from megascale.operate.driver.incidents import LOG_FILE, open_log, read_history
from megascale.operate.driver.job import Job
from megascale.operate.driver.job_families import exporting_job
from megascale.operate.driver.live_job import writing_live_file
from megascale.operate.driver.roster import format_nodes
from megascale.operate.node.stored_copies import copies_notice
from megascale.operate.print_line import print_line

if TYPE_CHECKING:
    from megascale.config.fault import FaultConfig
    from megascale.core.append_file import AppendFile
    from megascale.core.run_folder import RunFolder
    from megascale.operate.channel.driver_server import DriverServer
    from megascale.operate.driver.job_state import JobPlan
    from megascale.operate.driver.scheduler.port import Scheduler

REST_S = 5.0  # seconds at the end of a job in which its log may become writable
AGAIN_S = 0.2  # seconds between tries to write the log at the end


async def drive_job(
    plan: JobPlan,
    settings: FaultConfig,
    scheduler: Scheduler,
    server: DriverServer,
    launch: Mapping[str, object] | None = None,
    ended: Callable[[int], object] = lambda status: None,
    folder: RunFolder | None = None,
    copies: Path | None = None,
) -> int:
    """Drive a job to its end, and return its exit status.

    `launch`: its nodes, world and scheduler in the log; None if an earlier driver of this launch has written them.
    `ended` is called with the status, whatever becomes of the log. `folder`: of the run, which attempts must find; None
    if another launcher runs the ranks. `copies`: the folder of all runs' copies in memory, None if this one has none.

    Raises: MegascaleError if the log of incidents cannot be opened or read
    """
    path, clock = Path(plan.folder) / LOG_FILE, Clock()
    log, history, now = open_log(path), read_history(path), clock.now()
    begun = [] if launch is None else [{"event": "launch", "time": now, "run": plan.run, **launch}]
    events: list[dict[str, object]] = [*begun, {"event": "driver", "time": now}]
    for event in events:
        history.apply(event)
    job = Job(plan, settings, history, now)
    async with server:
        driver = Driver(job, server, scheduler, log, clock, folder)
        driver.perform([Log(event) for event in events])
        with exporting_job(job, clock.now):
            async with writing_live_file(job, clock.now):
                status = await driver.run()
        ended(status)
    if status == Exit.DO_NOT_REQUEUE and copies is not None:
        nodes = "" if folder is None else format_nodes(job.roster.order)
        if notice := copies_notice(copies, Path(plan.folder), nodes):
            print_line(notice)
    await _write_rest(log)
    return status


async def _write_rest(log: AppendFile) -> None:
    """Write the events that the log still lacks, within REST_S."""
    last = time.monotonic() + REST_S
    while log.pending:
        try:
            log.flush()
        except OSError as error:
            if time.monotonic() > last:
                lacking = f"{log.pending} lacking, {error.strerror or error}"
                print_line(f"WARNING: the log of incidents is incomplete: {lacking}")
                return
            await asyncio.sleep(AGAIN_S)
