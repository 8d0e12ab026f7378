"""The driver of a job: connects the state machine (`driver.job`) to agents, scheduler, log of incidents and clock.

A driver is a process of its own, started by the supervisor of `megascale launch` (`driver.supervisor`). It may be
killed at any time: agents go on training, and the supervisor starts another driver, which reads the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from megascale.core.errors import CheckpointError
from megascale.core.process import STOP_ORDER, stop_signals
from megascale.core.run_folder import RunFolder
from megascale.operate.channel.driver_server import Disconnected, DriverServer
from megascale.operate.channel.messages import CheckDone, Hello, Leave, Start
from megascale.operate.driver.alerts import AlertReader
from megascale.operate.driver.commands import CheckNodes, Command, Finish, Log, Say, Send
from megascale.operate.driver.decisions import ends_to_replace
from megascale.operate.driver.incidents import IncidentLog
from megascale.operate.driver.job import Job
from megascale.operate.driver.live_job import LiveWriter
from megascale.operate.driver.node_admission import NodeAdmission
from megascale.operate.driver.scheduler.port import Scheduler
from megascale.operate.driver.scheduler_calls import SchedulerCalls
from megascale.operate.health.remote_checks import RemoteChecks
from megascale.operate.print_line import print_line

TICK_S = 0.2
"""Seconds between looks at deadlines."""

LEAVE_S = 1.0
"""Seconds that agents have to leave at the end of the job."""

PAUSE_S = 2.0
"""A driver that was not scheduled for so long has heard nobody, and takes nobody for lost."""


class Clock:
    """Unix seconds that never go back, whatever is done to the host's clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Return the time."""
        return time.monotonic() + self._offset


class Driver:
    """The driver of `job`. `folder`: of the run, which every attempt must find, and whose copies in memory a node that
    is replaced removes. `status`: of the job, once it has ended.
    """

    def __init__(
        self,
        job: Job,
        server: DriverServer,
        scheduler: Scheduler,
        log: IncidentLog,
        clock: Clock,
        alerts: AlertReader | None = None,
        live: LiveWriter | None = None,
        folder: RunFolder | None = None,
    ) -> None:
        self._job = job
        self._server = server
        self._calls = SchedulerCalls(scheduler, job, clock.now, self.perform)
        self._log = log
        self._clock = clock
        self._alerts = alerts
        self._live = live
        self._folder = folder
        self._attempt_of_token = -1
        self._log_fails = False
        self._checks = RemoteChecks(server.send)
        settings = job.settings
        self._gate = NodeAdmission(self._checks, settings.check_timeout_s, settings.check_tolerance)
        self._at_gate: dict[str, Hello] = {}
        self._examinations: set[asyncio.Task[None]] = set()
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Drive the job to its end, and return its exit status."""
        loop = asyncio.get_running_loop()
        stops = stop_signals() if self._job.plan.observed else [STOP_ORDER]  # of the supervisor
        for number in stops:
            loop.add_signal_handler(number, lambda: self.perform(self._job.request_stop(self._clock.now())))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        calls = self._calls
        parts: Sequence[Coroutine] = (self._receive(), self._tick(), calls.run(), calls.watch_agents())
        tasks = [asyncio.ensure_future(part) for part in parts]
        if self._live is not None:
            tasks.append(asyncio.ensure_future(self._live.run(self._job, self._clock.now)))
        try:
            await asyncio.wait([self.status, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises what ended it
            status = await self.status
            await self._let_agents_leave()
            if self._live is not None:
                await self._live.finish(self._job, self._clock.now())
            return status
        finally:
            tasks += self._examinations
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _let_agents_leave(self) -> None:
        """Wait until the agents have taken their last message, and are gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                while self._server.agents:
                    await asyncio.sleep(0.02)

    def perform(self, commands: Sequence[Command]) -> None:
        """Carry out commands, in order."""
        for command in commands:
            match command:
                case Log():
                    self._append(command)
                case CheckNodes():
                    self._check_nodes(command)
                case Say():
                    print_line(command.text)
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
        try:
            self._log.append(command.event)
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
            now = self._clock.now()
            if isinstance(message, Disconnected):
                self._at_gate.pop(node, None)
                self._checks.lose(node)
                self.perform(self._job.disconnected(node, now))
            elif isinstance(message, CheckDone):
                self._checks.receive(node, message)
            elif isinstance(message, Hello) and self._must_check(message):
                self._examine(message)
            else:
                self.perform(self._job.receive(node, message, now))

    def _must_check(self, hello: Hello) -> bool:
        """Return True for a node that wants to join and runs no ranks."""
        known = hello.node in self._job.roster.members or hello.node in self._job.roster.excluded
        return self._job.plan.checks and hello.attempt is None and not hello.observer and not known

    def _check_nodes(self, command: CheckNodes) -> None:
        """Check nodes after an incident."""
        members = self._job.roster.members
        hellos = [members[node].hello for node in command.nodes if node in members]
        if command.paths:
            self._begin(self._examine_paths(hellos, command.report))
        elif not command.report:
            for hello in hellos:
                self._examine(hello)

    def _begin(self, examination: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(examination)
        self._examinations.add(task)
        task.add_done_callback(self._examinations.discard)

    def _examine(self, hello: Hello) -> None:
        """Check a node, whose agent joins or runs ranks again if the node is good."""
        self._at_gate[hello.node] = hello
        self._begin(self._finish_examination(hello))

    async def _examine_paths(self, hellos: Sequence[Hello], report: bool) -> None:
        """Check which nodes reach each other. Unless this is a `report`, a node that is not reached leaves the job, and
        an end of a bad link if there is a spare.
        """
        nodes, links = await self._gate.examine_paths(hellos)
        found = {f"link {a} - {b}": reason for (a, b), reason in links.items()}
        found |= {f"node {node}": reason for node, reason in nodes.items()}
        self.perform([Say(f"{what}: {reason}") for what, reason in found.items()])
        reasons = nodes | ends_to_replace(self._job, list(links), len(nodes))
        for hello in hellos if not report else ():
            self.perform(self._job.checked(hello.node, reasons.get(hello.node, ""), self._clock.now()))

    async def _finish_examination(self, hello: Hello) -> None:
        reason = await self._gate.examine(hello)
        if self._at_gate.get(hello.node) is not hello:
            return  # the agent was lost, or has begun anew
        del self._at_gate[hello.node]
        now, joined = self._clock.now(), hello.node in self._job.roster.members
        if not reason and not joined:
            self.perform(self._job.receive(hello.node, hello, now))
        self.perform(self._job.checked(hello.node, reason, now))

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
                self.perform(self._job.alert(alert["alert"], alert["value"], alert["recent"], now))
