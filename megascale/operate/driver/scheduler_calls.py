"""The driver's calls of the scheduler, one after another beside the job: a slow scheduler delays no decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from megascale.core.errors import MegascaleError
from megascale.operate.driver.commands import Command, Exclude, Request, StartAgent
from megascale.operate.driver.job import Job
from megascale.operate.driver.scheduler.port import Scheduler, SchedulerError
from megascale.operate.print_line import print_line


class SchedulerCalls:
    """Carries out the commands of `job` that concern the scheduler, and tells the job the results.

    `now`: the driver's clock; `perform`: carries out the commands with which the job answers.
    """

    def __init__(
        self, scheduler: Scheduler, job: Job, now: Callable[[], float], perform: Callable[[Sequence[Command]], None]
    ) -> None:
        self._scheduler = scheduler
        self._job = job
        self._now = now
        self._perform = perform
        self._commands: asyncio.Queue[Command] = asyncio.Queue()

    def put(self, command: Command) -> None:
        """Carry out a command, after those before."""
        if isinstance(command, StartAgent) and command.after_s:
            asyncio.get_running_loop().call_later(command.after_s, self._commands.put_nowait, command)
        else:
            self._commands.put_nowait(command)

    async def run(self) -> None:
        """Serve until the process ends. Starts the agents that do not run at first: all, or those that an earlier
        driver has not started or that ended with it. Of those of an attempt that may still run the job is told.
        """
        names = [node.name for node in await self._scheduler.nodes()]
        self._perform(self._job.expect(names, self._now()))
        without = await self._scheduler.without_agent()
        for node in [node for node in without if node in self._job.used]:
            self._perform(self._job.agent_ended(node, "its agent has ended", self._now()))
        await self._start([node for node in without if node not in self._job.used])
        while True:
            command = await self._commands.get()
            try:
                await self._carry_out(command)
            except MegascaleError as error:
                print_line(str(error))

    async def watch_agents(self) -> None:
        """Tell the job of ends of agents, until the process ends."""
        while True:
            end = await self._scheduler.next_end()
            how = f"killed by signal {-end.status}" if end.status < 0 else f"status {end.status}"
            more = f": {end.last_lines[-1]}" if end.last_lines else ""
            self._perform(self._job.agent_ended(end.node, f"its agent ended, {how}{more}", self._now()))

    async def _carry_out(self, command: Command) -> None:
        match command:
            case StartAgent():
                if command.node not in self._job.roster.members:  # it may have joined in the pause
                    await self._start([command.node])
            case Exclude():
                await self._scheduler.exclude(command.node, command.reason, command.until)
                await self._scheduler.release(command.node)
            case Request():
                try:
                    nodes = await self._scheduler.request(command.count)
                except SchedulerError as error:
                    print_line(str(error))
                    self._perform(self._job.refused(self._now()))
                else:
                    names = [node.name for node in nodes]
                    self._perform(self._job.expect(names, self._now()))
                    await self._start(names)

    async def _start(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._job.roster.excluded:
                continue
            try:
                await self._scheduler.start_agent(name)
            except SchedulerError as error:
                self._perform(self._job.agent_ended(name, str(error), self._now()))
