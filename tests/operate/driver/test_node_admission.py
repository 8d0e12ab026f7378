"""Nodes are checked before they join a job, and after a fault: a real driver, connections and log, simulated nodes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascale.config.fault import FaultConfig
from megascale.core.network import LOOPBACK
from megascale.operate.channel.agent_channel import AgentChannel
from megascale.operate.channel.driver_server import DriverServer
from megascale.operate.channel.messages import (
    Check,
    CheckDone,
    DriverMessage,
    Hello,
    Leave,
    OpenStore,
    RanksEnded,
    Start,
    Stop,
    StoreOpened,
)
from megascale.operate.driver.classify import Finding
from megascale.operate.driver.decisions import nodes_in_doubt, record
from megascale.operate.driver.driver import Clock, Driver
from megascale.operate.driver.end_stages import stop_attempt
from megascale.operate.driver.incidents import Action, Culprit, Incident, JobHistory, open_log, read_events
from megascale.operate.driver.job import Job
from megascale.operate.driver.job_state import JobPlan
from megascale.operate.driver.node_admission import MOST_COMPARED, NodeAdmission
from megascale.operate.driver.scheduler.port import AgentEnd, Node
from megascale.operate.health import diagnose
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.node_verdicts import judge

SECRET = secrets.token_bytes(32)


class Cluster:
    """A scheduler whose nodes have agents without processes. `memory`: value of that check by node."""

    def __init__(self, count: int, memory: dict[str, float], hosts: int = 1_000) -> None:
        self.names = [f"n{index}" for index in range(count)]
        self.memory = memory
        self.hosts = hosts
        self.received: dict[str, list[DriverMessage]] = {name: [] for name in self.names}
        self.excluded: list[str] = []
        self.asked = 0
        self.server: DriverServer | None = None
        self.cut: set[str] = set()
        self._tasks: list[asyncio.Future[Any]] = []

    async def nodes(self) -> list[Node]:
        return [Node(name, LOOPBACK) for name in self.names]

    async def without_agent(self) -> list[str]:
        return self.names

    async def start_agent(self, node: str) -> None:
        self._tasks.append(asyncio.ensure_future(self._agent(node)))

    async def exclude(self, node: str, reason: str, until: float) -> None:
        self.excluded.append(node)

    async def release(self, node: str) -> None:
        pass

    async def request(self, count: int) -> list[Node]:
        self.asked += count
        return []

    async def next_end(self) -> AgentEnd:
        await asyncio.Future()
        raise AssertionError("unreachable")

    async def _agent(self, node: str) -> None:
        assert self.server is not None
        host = f"host{self.names.index(node) % self.hosts}"
        async with AgentChannel(
            self.server.address, SECRET, lambda: [Hello(node, host, LOOPBACK, 2, started=1.0)]
        ) as agent:
            async for message in agent:
                self.received[node].append(message)
                if isinstance(message, Check):
                    await asyncio.sleep(0.3)  # all nodes are measured at the same time
                    agent.send(self._check(node, message))
                elif isinstance(message, OpenStore):
                    agent.send(StoreOpened(message.attempt, f"{LOOPBACK}:1"))
                elif isinstance(message, Stop):
                    agent.send(RanksEnded(message.attempt, ()))
                elif isinstance(message, Leave):
                    return

    def _check(self, node: str, order: Check) -> CheckDone:
        if order.name == "open_endpoint":
            return CheckDone(order.id, order.name, CheckResult("", details={"address": f"{node}:1"}).to_dict())
        if order.name == "reach":
            lost = {peer: "timed out" for peer in order.arguments["peers"] if {node, peer} & self.cut}
            return CheckDone(order.id, order.name, CheckResult("reach", details={"unreached": lost}).to_dict())
        parts = (CheckResult("limits", value=0.0), CheckResult("memory", value=self.memory.get(node, 1e9)))
        result = next((one for one in parts if one.name == order.name), CheckResult("join", parts=parts))
        return CheckDone(order.id, order.name, result.to_dict())

    def orders(self, kind: type[DriverMessage]) -> list[str]:
        return [node for node in self.names if any(isinstance(one, kind) for one in self.received[node])]


async def nothing(driver: Driver, job: Job) -> None:
    """No fault."""


def drive(
    cluster: Cluster, folder: Path, until: Callable[[Job], bool],
    fault: Callable[[Driver, Job], Awaitable[None]] = nothing, nodes: int = 2, checks: bool = True,
) -> Job:  # fmt: skip
    """Drive a job of two ranks on each node until a condition holds, with a fault meanwhile."""

    async def play() -> Job:
        clock = Clock()
        plan = JobPlan("run", nodes, 2 * nodes, ("train",), str(folder), checks=checks, folder=str(folder))
        job = Job(plan, FaultConfig(), JobHistory(), clock.now())
        log = open_log(folder / "incidents.jsonl")
        async with DriverServer(SECRET) as server:
            cluster.server = server
            driver = Driver(job, server, cluster, log, clock)  # type: ignore[arg-type]
            task = asyncio.ensure_future(driver.run())
            async with asyncio.timeout(30):
                await fault(driver, job)
                while not until(job):
                    assert not task.done(), task
                    await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return job

    return asyncio.run(play())


def test_a_slow_node_does_not_join_and_a_spare_takes_its_place(tmp_path: Path) -> None:
    cluster = Cluster(4, {"n1": 0.2e9})
    job = drive(cluster, tmp_path, lambda job: len(cluster.orders(Start)) == 2 and bool(cluster.excluded))
    assert cluster.excluded == ["n1"]
    assert cluster.orders(Leave) == ["n1"]
    assert "n1" not in cluster.orders(Start)
    assert "n1" in job.roster.excluded
    (event,) = [event for _, event in read_events(tmp_path / "incidents.jsonl") if event["event"] == "excluded"]
    assert event["node"] == "n1"
    assert event["reason"] == "it failed its checks: memory: 20% of the other nodes' median"
    names = [one.name for one in cluster.received["n1"] if isinstance(one, Check)]
    assert names == ["join", "memory", "memory"]  # a low value is measured again


def test_nodes_of_a_shared_host_are_not_compared(tmp_path: Path) -> None:
    cluster = Cluster(2, {"n1": 0.2e9}, hosts=1)
    drive(cluster, tmp_path, lambda job: cluster.orders(Start) == ["n0", "n1"])
    assert cluster.orders(Check) == ["n0", "n1"]


def test_after_a_fault_of_the_network_the_node_that_none_reaches_leaves(tmp_path: Path) -> None:
    cluster = Cluster(4, {})

    async def cut(driver: Driver, job: Job) -> None:
        while job.stage != "run":
            await asyncio.sleep(0.02)
        cluster.cut = {"n1"}
        record(job, Finding("network", "no progress", Culprit(), 1.0, "network: hang"), Action("restart"), 2.0)
        stop_attempt(job, time.time(), 0.1)
        driver.perform(job.tick(time.time()))

    job = drive(cluster, tmp_path, lambda job: cluster.excluded != [] and job.history.attempt == 1, cut, nodes=3)
    assert cluster.excluded == ["n1"]
    assert sorted(job.history.nodes) == ["n0", "n2", "n3"]


def test_a_launch_of_many_nodes_compares_each_with_some_and_leaves_the_event_loop_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor kills a driver whose event loop does not turn; the driver beats once a second."""
    count, compared, turns, most_tasks = 300, [], 0, 0

    def judge_counted(results: Any, *more: Any) -> Any:
        compared.append((turns, len(results)))
        return judge(results, *more)

    async def check(node: str, name: str, arguments: Any, timeout_s: float) -> CheckResult:
        await asyncio.sleep(0)
        value = 0.2e9 if node == "n7" else 1e9
        memory = CheckResult("memory", value=value)
        return memory if name == "memory" else CheckResult("join", parts=(memory,))

    async def play() -> list[str]:
        nonlocal turns, most_tasks
        gate = NodeAdmission(SimpleNamespace(run=check), 5.0, 0.3)  # type: ignore[arg-type]
        hellos = [Hello(f"n{index}", f"host{index}", LOOPBACK, 2) for index in range(count)]
        tasks = [asyncio.ensure_future(gate.examine(hello)) for hello in hellos]
        while not all(task.done() for task in tasks):
            turns += 1
            most_tasks = max(most_tasks, len(asyncio.all_tasks()))
            await asyncio.sleep(0)
        return [task.result() for task in tasks]

    monkeypatch.setattr(diagnose, "judge", judge_counted)
    reasons = asyncio.run(play())
    assert [index for index, reason in enumerate(reasons) if reason] == [7]
    assert len(compared) == count + 2, "only the low value is measured again"
    assert max(size for _, size in compared) <= MOST_COMPARED + 1
    assert max(Counter(turn for turn, _ in compared).values()) <= 3, "one a turn, and the value measured again"
    assert most_tasks <= 2 * count + 2, "a task for each node and its check"


def test_without_checks_nodes_join_at_once(tmp_path: Path) -> None:
    cluster = Cluster(2, {"n1": 0.2e9})
    drive(cluster, tmp_path, lambda job: cluster.orders(Start) == ["n0", "n1"], checks=False)
    assert cluster.orders(Check) == []


def test_which_incidents_put_which_nodes_in_doubt() -> None:
    def incident(class_: Any, kind: Any, *nodes: str) -> Incident:
        return Incident(1, class_, "", Culprit(nodes=nodes), (), "", "", 0, 0, 0.0, 0.0, action=Action(kind))

    running = ["a", "b"]
    assert nodes_in_doubt(incident("hang", "restart", "b"), running) == ["b"]
    assert nodes_in_doubt(incident("network", "restart", "b"), running) == ["a", "b"]
    assert nodes_in_doubt(incident("network", "wait", "b"), running) == ["a", "b"]
    assert nodes_in_doubt(incident("unknown", "restart"), running) == ["a", "b"]
    assert not nodes_in_doubt(incident("hang", "replace", "b"), running)  # it leaves the job
    assert not nodes_in_doubt(incident("software", "restart", "b"), running)
    assert not nodes_in_doubt(incident("hang", "restart", "c"), running)
