"""The launcher of a job on this host, without torchrun: driver and node in one process, the parent of all ranks.

When a rank dies, torchrun prints its error among the errors of ranks that lost their peer; when torchrun is killed, its
workers continue. Here all ranks die with the launcher. When a rank fails, the other ranks are ended and the root cause
is shown, with its rank and host.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megascale.config.fault import FaultConfig
from megascale.core.errors import ConfigError, Exit, MegascaleError, Problem
from megascale.core.files import exists
from megascale.core.network import LOOPBACK, has_loopback
from megascale.core.process import StopRequests, handling_stops
from megascale.core.rank import format_ranks
from megascale.core.run_folder import LOGS, LostFolderError
from megascale.operate.channel.ends import AgentEnd, DriverEnd
from megascale.operate.channel.messages import RankEnd
from megascale.operate.channel.secret import new_secret, secret_descriptor
from megascale.operate.diagnose.hang import flight
from megascale.operate.driver.alone import STOPS
from megascale.operate.driver.classify import Finding, is_killed
from megascale.operate.driver.driver import Clock, Driver
from megascale.operate.driver.incidents import JobHistory
from megascale.operate.driver.job import Job
from megascale.operate.driver.job_state import JobPlan
from megascale.operate.driver.live_job import writing_live_file
from megascale.operate.driver.scheduler.none import NoScheduler
from megascale.operate.node.agent import Agent
from megascale.operate.node.node_ranks import LOG_NAME
from megascale.operate.node.rank_ends import describe_status, try_find_suspect
from megascale.operate.node.ranks import NodePlace
from megascale.operate.print_line import print_line

POLL_S = 1.0  # seconds between looks at the states of the ranks; of their ends the kernel tells at once
LAST_LINES = 20  # most lines of a rank's output in a report


def run_on_this_host(arguments: Sequence[str], world: int, folder: Path, metrics: tuple[str, int] = ("", 0)) -> int:
    """Run a job on this host to its end, `python -m megascale ARGUMENTS` as `world` ranks, and return its exit status.
    `folder`: of the run; `metrics`: address and port where they are served, as in `[observe]`. Rank 0 shares this
    terminal; the other ranks write to `folder`/logs/rank-N.log.

    At the first request to stop the ranks are ordered to finish their step and save; the second kills them.

    Raises: ConfigError on a host without a loopback interface; MegascaleError if a rank cannot be started.
    """
    if not has_loopback():
        what = "the loopback interface is down, and the ranks need it"
        raise ConfigError([Problem(f"host {socket.gethostname()}", "", what, "ip link set lo up")])
    stops, logs = _Stops(), folder / LOGS
    plan = JobPlan(
        folder.name, 1, world, tuple(arguments), str(logs), revivable=False, alone=True, folder=str(folder),
        metrics_address=metrics[0], metrics_port=metrics[1],
        find_suspect=functools.partial(try_find_suspect, folder / flight.DUMP_FOLDER),
    )  # fmt: skip
    with handling_stops(stops.receive), secret_descriptor(new_secret()) as secret:
        logs.mkdir(parents=True, exist_ok=True)
        for old in logs.glob("rank-*.*"):
            old.unlink()
        job = asyncio.run(_run(plan, secret, stops))
    if job.fault is not None and job.fault.end is not None and not job.fault.end.started:
        raise MegascaleError(job.fault.end.error or "")
    return Exit.UNCLASSIFIED if job.history.ended is None else job.history.ended


class _Stops:
    """Requests to stop, from the handlers of signals to the driver in its event loop."""

    def __init__(self) -> None:
        self._requests = StopRequests()
        self._passed = 0
        self._driver: Driver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self._requests.add(number, time.monotonic()) and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: the job has ended
                self._loop.call_soon_threadsafe(self._pass_on)

    def pass_to(self, driver: Driver) -> None:
        """Pass requests on to `driver`, also those before."""
        self._driver, self._loop = driver, asyncio.get_running_loop()
        self._pass_on()

    def _pass_on(self) -> None:
        assert self._driver is not None
        while self._passed < self._requests.count:
            self._passed += 1
            self._driver.request_stop(Exit.INTERRUPTED if self._requests.first == signal.SIGINT else Exit.STOPPED)


async def _run(plan: JobPlan, secret: int, stops: _Stops) -> Job:
    """Run driver and agent to the job's end, and print what has ended it, if that was not its last step."""
    clock, end = Clock(), DriverEnd()
    job = Job(plan, FaultConfig(poll_s=POLL_S), JobHistory(), clock.now())
    driver = Driver(job, end, NoScheduler(), None, clock, say=lambda text: None)  # `_report` tells of the end
    place = NodePlace(socket.gethostname(), LOOPBACK, "", plan.world, folder=Path(plan.folder), alone=True)
    agent = Agent(place, functools.partial(AgentEnd, end), secret, say=print_line)

    async def drive() -> None:
        async with writing_live_file(job, clock.now):
            await driver.run()
        _report(job, Path(plan.logs))

    async with asyncio.TaskGroup() as group:
        group.create_task(drive())
        group.create_task(agent.run(heeds_signals=False))
        stops.pass_to(driver)
    return job


def _report(job: Job, logs: Path) -> None:
    """Print why the job has ended: a rank that failed, a stop without a step, or a signal that nobody of it sent."""
    ends = sorted(job.attempt.ends.values(), key=lambda end: end.time) if job.attempt is not None else []
    if job.fault is not None:
        if job.fault.end is None or job.fault.end.started:
            print_line("\n".join(_describe_fault(job.fault, ends, job.plan.world, logs)))
        return
    if job.stop_requests and not any(end.in_order for end in ends):
        told = (end.error for end in ends if end.error and end.exit_status in STOPS)
        stopped = next(told, "stopped before the first step")
        print_line("stopped at once, without saving" if job.stop_requests > 1 else stopped)
    for end in ends:
        if end.unordered:
            name = signal.Signals(end.unordered).name
            print_line(f"the job has stopped because rank {end.rank} received {name}, which nobody of the job sent")


def _describe_fault(fault: Finding, ends: Sequence[RankEnd], world: int, logs: Path) -> list[str]:
    """Return the lines of a report: the culprit, with its last output if it has not said how it ended; the others."""
    rank = fault.end.rank if fault.end is not None else next(iter(fault.culprit.ranks), None)
    if rank is None or (fault.end is None and fault.class_ == "node"):
        return [fault.what]
    killed = [end.rank for end in ends if is_killed(end) and end.rank != rank]
    explained = fault.end is not None and fault.end.error is not None
    if fault.end is None:
        message = "; ".join(fault.evidence) or fault.what
    else:
        message = fault.end.error or describe_status(fault.end.status)
    said = f": {message}" if rank or not explained else ""  # rank 0 has printed its error on this terminal
    also = f"; {format_ranks(killed)}: killed by SIGKILL" if killed else ""
    lines = [f"rank {rank} of {world} on {socket.gethostname()} failed{said}{also}"]
    if rank and not exists(logs):
        lines.append(str(LostFolderError(logs.parent)))
    elif rank:
        log = logs / LOG_NAME.format(rank)
        if not explained:
            with contextlib.suppress(OSError):
                text = log.read_text(encoding=sys.stderr.encoding, errors="replace")  # the launcher's is a rank's too
                lines += [f"  | {line}" for line in text.splitlines()[-LAST_LINES:]]
        lines.append(f"its output: {log}")
    if others := world - 1 - len(killed):
        lines.append(f"the other {others} rank{'s were' if others > 1 else ' was'} ended")
    return lines
