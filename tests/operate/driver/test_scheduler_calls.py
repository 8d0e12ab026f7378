"""The driver's calls of the scheduler: agents that are started after a pause, and nodes that get no agent."""

from __future__ import annotations

import asyncio

from megascale.config.fault import FaultConfig
from megascale.operate.channel.messages import Hello
from megascale.operate.driver.commands import StartAgent
from megascale.operate.driver.incidents import JobHistory
from megascale.operate.driver.job import Job
from megascale.operate.driver.job_state import JobPlan
from megascale.operate.driver.scheduler.port import Node
from megascale.operate.driver.scheduler_calls import SchedulerCalls


class Scheduler:
    """A scheduler that holds nodes, and notes for which an agent is started."""

    def __init__(self, held: str) -> None:
        self.held = list(held)
        self.started: list[str] = []

    async def nodes(self) -> list[Node]:
        return [Node(name, name) for name in self.held]

    async def without_agent(self) -> list[str]:
        return self.held

    async def start_agent(self, node: str) -> None:
        self.started.append(node)


def new_job(history: JobHistory | None = None) -> Job:
    plan = JobPlan("run", 2, 2, ("train",), "/logs", requestable=True)
    return Job(plan, FaultConfig(), history or JobHistory(), 0.0)


def test_an_agent_is_started_after_its_pause_unless_the_node_has_joined() -> None:
    scheduler, job = Scheduler(""), new_job()

    async def play() -> None:
        calls = SchedulerCalls(scheduler, job, lambda: 0.0, lambda commands: None)  # type: ignore[arg-type]
        task = asyncio.ensure_future(calls.run())
        for node in "abc":
            calls.put(StartAgent(node, 0.05 if node < "c" else 0.0))
        await asyncio.sleep(0.01)
        assert scheduler.started == ["c"]
        job.receive("a", Hello("a", "a", "a", 1), 0.0)
        while "b" not in scheduler.started:
            await asyncio.sleep(0.01)
        assert scheduler.started == ["c", "b"]
        task.cancel()

    asyncio.run(play())


def test_a_new_driver_is_told_of_agents_that_have_ended_without_one() -> None:
    """The end of an agent that was told to a driver as it died is told to no other."""
    history = JobHistory(attempt=0, nodes=("a", "b"), world=2)
    plan = JobPlan("run", 2, 2, ("train",), "/logs", takeover=True)
    job = Job(plan, FaultConfig(), history, 0.0)
    scheduler = Scheduler("bc")

    async def play() -> None:
        calls = SchedulerCalls(scheduler, job, lambda: 0.0, lambda commands: None)  # type: ignore[arg-type]
        task = asyncio.ensure_future(calls.run())
        while not scheduler.started:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(play())
    assert job.attempt is not None and list(job.attempt.lost) == ["b"]
    assert scheduler.started == ["c"], "what becomes of b is the job's decision"


def test_a_node_that_the_log_excludes_gets_no_agent() -> None:
    scheduler, job = Scheduler("abc"), new_job(JobHistory(excluded={"b": 900.0}))

    async def play() -> None:
        calls = SchedulerCalls(scheduler, job, lambda: 0.0, lambda commands: None)  # type: ignore[arg-type]
        task = asyncio.ensure_future(calls.run())
        while "c" not in scheduler.started:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(play())
    assert scheduler.started == ["a", "c"]
