"""The supervisor: the process of `megascale launch`, parent of the driver and, through a scheduler, of all agents.

It decides nothing. It holds what must outlive a driver: the lock of the run's folder, the driver's port, the job's
secret and the agents. A driver that dies before it has said the job's end, to the log or here, is started again; stop
signals are passed on; rank 0's output is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megascale.core.errors import Exit
from megascale.core.process import STOP_ORDER, StopRequests, die_with_parent, module_command, stop_signals
from megascale.operate.channel.secret import DESCRIPTOR_VARIABLE, SECRET_VARIABLE, new_secret, secret_descriptor
from megascale.operate.driver.incidents import LOG_FILE, JobHistory, is_lost, read_history
from megascale.operate.driver.scheduler.adapters import ADAPTERS
from megascale.operate.driver.scheduler.port import AgentLaunch, Scheduler
from megascale.operate.driver.scheduler.remote import serve
from megascale.operate.node.output import follow_rank_0
from megascale.operate.node.threads import call_at_end
from megascale.operate.print_line import print_line

FINAL = (Exit.OK, Exit.CONFIG, Exit.DATA, Exit.CHECKPOINT, Exit.DO_NOT_REQUEUE)
"""Exit statuses after which the scheduler is not to start the job again: done, or an error that would recur."""

SILENT_S = 30  # seconds without a beat after which a driver is killed: it is stopped, or its event loop hangs
AGENTS_END_S = 10.0  # seconds in which agents without ranks leave

CRASHES, CRASHES_S = 5, 60.0
"""Deaths of drivers, and the seconds in which they count together: the job is given up then."""


@dataclass
class _Signals:
    """Requests to stop so far, passed on to the driver as an order. Orders are blocked in a new driver until it handles
    them. `end_agents` is called at requests after the first.
    """

    driver: subprocess.Popen | None = None
    requests: StopRequests = field(default_factory=StopRequests)
    end_agents: Callable[[], object] = lambda: None

    def receive(self, number: int) -> None:
        if self.requests.add(number, time.monotonic()):
            self.pass_on()
            if self.requests.count > 1:
                self.end_agents()

    def pass_on(self) -> None:
        if self.driver is not None and self.driver.poll() is None:
            self.driver.send_signal(STOP_ORDER)


@dataclass
class _Pulse:
    """Beats of a driver. `missed`: looks without a beat since the last one; None before the first, as it imports."""

    missed: int | None = None

    def beat(self) -> None:
        self.missed = 0

    def look(self) -> bool:
        """Return True if there was a beat within the last SILENT_S looks, one a second. A supervisor that was stopped
        itself has not looked meanwhile.
        """
        if self.missed is not None:
            self.missed += 1
        return self.missed is None or self.missed <= SILENT_S


async def supervise(
    folder: Path, arguments: Sequence[str], nodes: int, scheduler: str, slots: int = 0, grace_s: float = 0.0
) -> int:
    """Run a job to its end, through the deaths of drivers, and return its exit status. The caller holds the lock of the
    run's folder.

    `folder`: of the run; `arguments`: of the driver's command; `nodes`: of the job, spares included; `scheduler`:
    name of the adapter; `slots`: ranks of a node. `grace_s`: seconds in which ranks may save that no driver stops.

    Raises: SchedulerError, MegascaleError for an unreadable log
    """
    adapter = ADAPTERS[scheduler]
    before = read_history(folder / LOG_FILE)
    secret = os.environ.get(SECRET_VARIABLE) or new_secret()
    signals, loop = _Signals(), asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, signals.receive, number)
    reserved, listen, address = adapter.reserve()
    with reserved, secret_descriptor(secret) as descriptor:
        logs = folder / "logs"
        opened = adapter.open(nodes, AgentLaunch(address, secret, logs, slots=slots))
        requeue, grace_s = True, grace_s + AGENTS_END_S
        output = asyncio.ensure_future(follow_rank_0(logs, before.attempt + 1, sys.stdout))
        try:
            words = (*arguments, "--listen", listen)
            history = await _keep_driver(folder / LOG_FILE, words, descriptor, opened, signals, before)
            requeue = history.ended not in FINAL
            grace_s = AGENTS_END_S if history.ended is not None else grace_s
        finally:
            signals.end_agents = lambda: asyncio.ensure_future(opened.stop(requeue, 0.0))
            await opened.stop(requeue, grace_s)
            output.cancel()
            await asyncio.gather(output, return_exceptions=True)
    if history.ended == Exit.STOPPED and signals.requests.first == signal.SIGINT and not history.step:
        return Exit.INTERRUPTED
    return Exit.UNCLASSIFIED if history.ended is None else history.ended


async def _keep_driver(
    log: Path, arguments: Sequence[str], secret: int, scheduler: Scheduler, signals: _Signals, before: JobHistory
) -> JobHistory:
    """Keep a driver alive until the job has ended, as the log or the driver says, and return the history then.

    `before`: the history before this launch.
    """
    deaths: deque[float] = deque(maxlen=CRASHES)
    role = "--first"
    while True:
        ours, theirs = socket.socketpair()
        with theirs:
            driver = _start_driver([*arguments, role], theirs.fileno(), secret)
        pulse, said = _Pulse(), list[int]()
        serving = asyncio.ensure_future(serve(scheduler, ours, pulse.beat, said.append))
        signals.driver = driver
        if signals.requests.count:
            signals.pass_on()
        status = await _end_of(driver, pulse)
        await serving  # the driver has hung up
        history = read_history(log)
        begun = history.launched != before.launched  # else the log ends with an earlier launch
        logged = history.ended if begun else None
        history = replace(history, ended=said[0] if said else logged)  # on a full disk the log lacks it
        if history.ended is None and is_lost(log):
            print_line(f"the driver has ended, and so has the job: its log is lost with the run's folder {log.parent}")
            return replace(history, ended=Exit.DO_NOT_REQUEUE)
        if history.ended is not None:
            return history
        deaths.append(time.monotonic())
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if len(deaths) == CRASHES and deaths[-1] - deaths[0] < CRASHES_S:
            print_line(f"the driver {how}, {CRASHES} times in a row: giving up")
            return history
        print_line(f"the driver {how}; a new one takes over; ranks that run go on")
        role = "--takeover" if begun else "--first"


def _start_driver(arguments: Sequence[str], scheduler: int, secret: int) -> subprocess.Popen:
    """Start a driver. It heeds orders alone: a stop signal that it gets too is for the supervisor to take."""
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_BLOCK, [STOP_ORDER])
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)

    return subprocess.Popen(
        module_command("megascale", "driver", *arguments, "--scheduler-descriptor", str(scheduler)),
        env=os.environ | {DESCRIPTOR_VARIABLE: str(secret)},
        stdin=subprocess.DEVNULL,
        pass_fds=[scheduler, secret],
        start_new_session=True,  # Ctrl-C reaches the supervisor alone
        preexec_fn=prepare,  # noqa: PLW1509  calls of the kernel, no lock
    )


async def _end_of(process: subprocess.Popen, pulse: _Pulse) -> int:
    """Wait for the end of a driver, without a thread; kill it when its pulse stops."""
    ended = asyncio.Event()
    call_at_end(process.pid, ended.set)
    try:
        while process.poll() is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 1.0)
            if not pulse.look():
                print_line(f"the driver does not answer for {SILENT_S} s: killing it")
                process.kill()
                await ended.wait()
    finally:
        process.kill()  # unless it has been waited for
    return process.wait()
