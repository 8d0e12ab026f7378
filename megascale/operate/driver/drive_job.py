"""Run the driver of a job to its end: of a job of `megascale launch`, or of one that is only watched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megascale.config.run import RunConfig
from megascale.core.errors import Exit, MegascaleError
from megascale.core.run_folder import RunFolder
from megascale.operate.channel.driver_server import DriverServer
from megascale.operate.channel.streams import tls_from_environment
from megascale.operate.diagnose.hang.hang import hang_verdict
from megascale.operate.driver.alerts import METRICS_FILE, AlertReader
from megascale.operate.driver.commands import Log
from megascale.operate.driver.driver import Clock, Driver
from megascale.operate.driver.incidents import LOG_FILE, IncidentLog, read_history
from megascale.operate.driver.job import Job
from megascale.operate.driver.job_families import job_metrics
from megascale.operate.driver.job_state import JobPlan
from megascale.operate.driver.live_job import LiveWriter
from megascale.operate.driver.roster import format_nodes
from megascale.operate.driver.scheduler.port import Scheduler
from megascale.operate.node.stored_copies import copies_notice
from megascale.operate.print_line import print_line
from megascale.operate.store.exporter import DRIVER, MetricsEndpoint, exporting
from megascale.record.live_file import LIVE_FILE, LiveFile

REST_S = 5.0
"""Seconds at the end of a job in which its log may become writable."""

AGAIN_S = 0.2
"""Seconds between tries to write the log at the end."""


async def drive_job(
    config: RunConfig,
    plan: JobPlan,
    scheduler: Scheduler,
    secret: bytes,
    listen: tuple[str, int],
    launch: Mapping[str, object] | None = None,
    ended: Callable[[int], object] = lambda status: None,
    folder: RunFolder | None = None,
) -> int:
    """Drive a job to its end, and return its exit status.

    `listen`: address and port for the agents. `launch`: its nodes, world and scheduler in the log; None if an earlier
    driver of this launch has written them. `ended` is called with the status, whatever becomes of the log. `folder`: of
    the run, which attempts must find; None if another launcher runs the ranks.

    Raises: MegascaleError if the log of incidents cannot be opened or read
    """
    log, clock = _open_log(config.folder / LOG_FILE), Clock()
    history = read_history(config.folder / LOG_FILE)
    now = clock.now()
    begun = [] if launch is None else [{"event": "launch", "time": now, "run": config.name, **launch}]
    events: list[dict[str, object]] = [*begun, {"event": "driver", "time": now}]
    for event in events:
        history.apply(event)
    job = Job(plan, config.fault, history, hang_verdict, now)
    async with DriverServer(secret, *listen, tls_from_environment(), config.name) as server:
        alerts, live = AlertReader(config.folder / METRICS_FILE), LiveWriter(LiveFile(config.folder / LIVE_FILE))
        driver = Driver(job, server, scheduler, log, clock, alerts, live, folder)
        driver.perform([Log(event) for event in events])
        metrics = config.observe.metrics_address, config.observe.metrics_port
        endpoint = MetricsEndpoint(*metrics, config.name, config.folder, DRIVER)
        with exporting(job_metrics(job, clock.now, DRIVER), endpoint, print_line):
            status = await driver.run()
        ended(status)
    if status == Exit.DO_NOT_REQUEUE and config.checkpoint.every and config.checkpoint.memory_every:
        nodes = "" if folder is None else format_nodes(job.roster.order)
        if notice := copies_notice(Path(config.checkpoint.memory_dir), config.folder, nodes):
            print_line(notice)
    await _write_rest(log)
    return status


async def _write_rest(log: IncidentLog) -> None:
    """Write the events that the log still lacks, within REST_S."""
    last = time.monotonic() + REST_S
    while log.pending:
        try:
            log.flush()
        except OSError as error:
            if time.monotonic() > last:
                print_line(
                    f"WARNING: the log of incidents is incomplete: {log.pending} lacking, {error.strerror or error}"
                )
                return
            await asyncio.sleep(AGAIN_S)


def _open_log(path: Path) -> IncidentLog:
    try:
        return IncidentLog(path)
    except OSError as error:
        what = f"{path}: the log of incidents cannot be opened: {error.strerror or error}"
        raise MegascaleError(what, hint="see the file system of the run's folder") from None
