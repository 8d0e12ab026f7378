"""The driver of a job: connects the state machine (`driver.job`) to agents, scheduler, log of incidents and clock.

A driver is a process of its own, started by the supervisor of `megascale launch` (`driver.supervisor`). It may be
killed at any time: agents go on training, and the supervisor starts another driver, which reads the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.core.errors import CheckpointError, Exit
from megascale.core.run_folder import METRICS_FILE
from megascale.operate.channel.ends import Disconnected, DriverEnd
from megascale.operate.channel.messages import Leave, Start
from megascale.operate.driver.alerts import AlertReader
from megascale.operate.driver.commands import CheckNodes, Command, Finish, Log, Say, Send
from megascale.operate.driver.job import Job
from megascale.operate.driver.scheduler_calls import SchedulerCalls
from megascale.operate.print_line import print_line

if TYPE_CHECKING:
    from megascale.core.append_file import AppendFile
    from megascale.core.run_folder import RunFolder
    from megascale.operate.driver.node_admission import NodeGate
    from megascale.operate.driver.scheduler.port import Scheduler

TICK_S = 0.2  # seconds between looks at deadlines
LEAVE_S = 1.0  # seconds that agents have to leave at the end of the job
PAUSE_S = 2.0  # a driver that was not scheduled for so long has heard nobody, and takes nobody for lost


class Clock:
    """Unix seconds that never go back, whatever is done to the host's clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Return the time."""
        return time.monotonic() + self._offset


class Driver:
    """The driver of `job`. `folder`: of the run, which every attempt must find, and whose copies in memory a node that
    is replaced removes; `log`: None for a job whose driver is not restarted; `say`: prints a line for people. `status`:
    of the job, once it has ended.
    """

    def __init__(
        self,
        job: Job,
        server: DriverEnd,
        scheduler: Scheduler,
        log: AppendFile | None,
        clock: Clock,
        folder: RunFolder | None = None,
        say: Callable[[str], None] = print_line,
    ) -> None:
        self._job = job
        self._server = server
        self._calls = SchedulerCalls(scheduler, job, clock.now, self.perform)
        self._log = log
        self._clock = clock
        self._alerts = None if log is None else AlertReader(Path(job.plan.folder) / METRICS_FILE)
        self._folder = folder
        self._say = say
        self._attempt_of_token = -1
        self._log_fails = False
        self._gate: NodeGate | None = None
        if job.plan.checks:
            from megascale.operate.driver.node_admission import NodeGate

            self._gate = NodeGate(job, server.send, self.perform, clock.now)
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Drive the job to its end, and return its exit status."""
        stops = self._job.plan.stops
        for number in stops:
            asyncio.get_running_loop().add_signal_handler(number, self.request_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        parts: Sequence[Coroutine] = (self._receive(), self._tick(), self._calls.run(), self._calls.watch_agents())
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            await asyncio.wait([self.status, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises what ended it
            status = await self.status
            with contextlib.suppress(TimeoutError):  # until the agents have taken their last message, and are gone
                async with asyncio.timeout(LEAVE_S):
                    while self._server.agents:
                        await asyncio.sleep(0.02)
            return status
        finally:
            tasks += self._gate.examinations if self._gate is not None else ()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def request_stop(self, status: int = Exit.STOPPED) -> None:
        """Take a request to stop the job. `status`: of a job that has not trained."""
        self.perform(self._job.request_stop(self._clock.now(), status))

    def perform(self, commands: Sequence[Command]) -> None:
        """Carry out commands, in order."""
        for command in commands:
            match command:
                case Log():
                    self._append(command)
                case CheckNodes() if self._gate is not None:
                    self._gate.check_nodes(command)
                case Say():
                    self._say(command.text)
                case Send(node, Start() as start):
                    self._server.send(node, replace(start, folder=self._folder))
                case Send(node, Leave() as leave) if (
                    self._folder and self._folder.memory and node in self._job.roster.excluded
                ):
                    self._server.send(node, replace(leave, copies=str(self._folder.copies(node))))
                case Send():
                    self._server.send(command.node, command.message)
                case Finish():
                    if not self.status.done():
                        self.status.set_result(command.status)
                case _:
                    self._calls.put(command)

    def _append(self, command: Log) -> None:
        if self._log is None:
            return
        try:
            self._log.append(json.dumps(command.event).encode() + b"\n")
        except OSError as error:  # the job is more important than its log, which is written once it can be
            if not self._log_fails:
                print_line(f"WARNING: the log of incidents cannot be written: {error.strerror or error}")
        self._log_fails = bool(self._log.pending)

    def _read_token(self) -> None:
        """Read the run's token once an attempt has trained: it names the start whose copies in memory count."""
        attempt = self._job.attempt
        if self._folder and attempt and attempt.noted and attempt.number != self._attempt_of_token:
            with contextlib.suppress(CheckpointError):  # the folder may be away
                self._folder, self._attempt_of_token = self._folder.read_again(), attempt.number

    async def _receive(self) -> None:
        async for node, message in self._server:
            if self._gate is not None and self._gate.takes(node, message):
                continue
            now = self._clock.now()
            if isinstance(message, Disconnected):
                self.perform(self._job.disconnected(node, now))
            else:
                self.perform(self._job.receive(node, message, now))

    async def _tick(self) -> None:
        last = self._clock.now()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock.now()
            if now - last > PAUSE_S:
                self._job.forgive(now - last)
            last = now
            self.perform(self._job.tick(now))
            self._read_token()
            for alert in self._alerts.new() if self._alerts is not None else ():
                self.perform(self._job.alert(alert, now))
