"""The local scheduler and its client in another process: agents are started, watched, killed and replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lab.testbed import HostLink, Testbed, export_testbed
from megascale.core.network import LOOPBACK
from megascale.core.process import process_exists
from megascale.operate.driver.scheduler.local import (
    LocalScheduler,
    NodeHost,
    hosts_from_environment,
    node_processes,
)
from megascale.operate.driver.scheduler.port import SLOTS_VARIABLE, AgentLaunch, Node, Scheduler, SchedulerError
from megascale.operate.driver.scheduler.remote import SchedulerClient, serve
from tests.tools.lab.test_testbed import missing

SECRET = "0123456789abcdef" * 4

AGENT = """
import os, subprocess, sys, time
secret = os.pread(int(os.environ["MEGASCALE_JOB_SECRET_FD"]), 100, 0).decode()
names = "MEGASCALE_NODE", "MEGASCALE_DRIVER", "MEGASCALE_NODE_ADDRESS"
print(*map(os.environ.get, names), secret, flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""
"""An agent that starts a rank, which does not die with the agent."""


def launch(folder: Path, program: str = AGENT) -> AgentLaunch:
    return AgentLaunch("127.0.0.1:4000", SECRET, folder, [sys.executable, "-c", program])


async def until(done: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def stopped_after(scheduler: LocalScheduler, use: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(use, 60)
    finally:
        await scheduler.stop(False, 10.0)


def run(tmp_path: Path, use: Callable[[LocalScheduler], Awaitable[None]], count: int = 2, **options: object) -> None:
    async def body() -> None:
        scheduler = LocalScheduler(count, launch(tmp_path), **options)
        await stopped_after(scheduler, use(scheduler))
        for node in range(10):
            assert not scheduler.processes(f"node{node}")

    asyncio.run(body())


def ready(tmp_path: Path, node: str) -> Callable[[], bool]:
    log = tmp_path / f"agent-{node}.log"
    return lambda: log.exists() and "ready" in log.read_text()


async def both(scheduler: LocalScheduler, node: str) -> list[int]:
    """Return the agent and the rank of a node: a process that begins has no environment yet."""
    await until(lambda: len(scheduler.processes(node)) == 2)
    return scheduler.processes(node)


def test_an_agent_knows_its_node_its_driver_and_the_secret(tmp_path: Path) -> None:
    async def use(scheduler: LocalScheduler) -> None:
        await scheduler.start_agent("node1")
        await until(ready(tmp_path, "node1"))
        line = (tmp_path / "agent-node1.log").read_text().splitlines()[0]
        assert line == f"node1 127.0.0.1:4000 127.0.0.1 {SECRET}"
        agent, rank = await both(scheduler, "node1")
        for pid in (agent, rank):
            assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()

    run(tmp_path, use)


def test_a_lost_agent_is_told_and_its_node_is_replaced(tmp_path: Path) -> None:
    async def use(scheduler: LocalScheduler) -> None:
        assert [node.name for node in await scheduler.nodes()] == ["node0", "node1"]
        await scheduler.start_agent("node0")
        await until(ready(tmp_path, "node0"))
        agent, rank = await both(scheduler, "node0")
        os.kill(agent, signal.SIGKILL)
        end = await scheduler.next_end()
        assert (end.node, end.status) == ("node0", -signal.SIGKILL)
        assert end.last_lines[-1] == "ready"
        await scheduler.exclude("node0", "test", None)
        await scheduler.release("node0")  # kills the rank that the agent left behind
        assert not process_exists(rank)
        assert [node.name for node in await scheduler.request(1)] == ["node2"]
        assert [node.name for node in await scheduler.nodes()] == ["node1", "node2"]
        await scheduler.start_agent("node2")
        await until(ready(tmp_path, "node2"))
        with pytest.raises(SchedulerError, match="node0"):
            await scheduler.start_agent("node0")

    run(tmp_path, use)


def test_an_excluded_node_comes_back_after_its_time_only(tmp_path: Path) -> None:
    async def use(scheduler: LocalScheduler) -> None:
        await scheduler.exclude("node0", "slow", time.time() + 0.3)
        await scheduler.release("node0")
        with pytest.raises(SchedulerError, match="no further node"):
            await scheduler.request(5)
        await asyncio.sleep(0.3)
        assert [node.name for node in await scheduler.request(5)] == ["node0"]

    run(tmp_path, use, hosts=[NodeHost(LOOPBACK)] * 2)


def test_a_second_agent_of_a_node_takes_the_place_of_the_first(tmp_path: Path) -> None:
    async def use(scheduler: LocalScheduler) -> None:
        await scheduler.start_agent("node0")
        await until(ready(tmp_path, "node0"))
        first = scheduler.processes("node0")
        await scheduler.start_agent("node0")
        assert not any(process_exists(pid) for pid in first)

    run(tmp_path, use)


def test_nodes_without_an_agent_are_listed_and_an_old_end_is_no_news(tmp_path: Path) -> None:
    async def use(scheduler: LocalScheduler) -> None:
        assert await scheduler.without_agent() == ["node0", "node1"]
        for node in ("node0", "node1"):
            await scheduler.start_agent(node)
            await until(ready(tmp_path, node))
        assert await scheduler.without_agent() == []
        for node in ("node0", "node1"):
            for pid in scheduler.processes(node):
                os.kill(pid, signal.SIGKILL)
        await until(lambda: scheduler._processes.pid("node0") is scheduler._processes.pid("node1") is None)
        assert await scheduler.without_agent() == ["node0", "node1"]
        await scheduler.start_agent("node0")
        assert (await scheduler.next_end()).node == "node1", "node0 has an agent again"

    run(tmp_path, use)


@pytest.mark.parametrize(("slots", "found"), [(0, None), (8, "8")])
def test_an_agent_knows_the_ranks_of_its_node(slots: int, found: str | None, tmp_path: Path) -> None:
    """Checks run a process for each of them, and a GPU node has more cores than GPUs."""
    variables = AgentLaunch("n0:1", SECRET, tmp_path, slots=slots).variables(Node("n1", "10.0.0.1"))
    assert variables.get(SLOTS_VARIABLE) == found


def test_an_agent_that_cannot_be_started(tmp_path: Path) -> None:
    async def body() -> None:
        scheduler = LocalScheduler(1, AgentLaunch("127.0.0.1:4000", SECRET, tmp_path, ["/no/such/python"]))
        with pytest.raises(SchedulerError, match="/no/such/python"):
            await scheduler.start_agent("node0")

    asyncio.run(body())


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_hosts_of_a_testbed_are_nodes(tmp_path: Path) -> None:
    program = """
import os, subprocess, time
print(os.environ["MEGASCALE_NODE_ADDRESS"], os.environ["GLOO_SOCKET_IFNAME"], flush=True)
subprocess.run(["ip", "-o", "-4", "address", "show", "eth0"])
print("ready", flush=True)
time.sleep(600)
"""

    async def body() -> None:
        with Testbed(2, HostLink()) as testbed:
            hosts = hosts_from_environment(export_testbed(testbed))
            scheduler = LocalScheduler(1, launch(tmp_path, program), hosts=hosts)
            await stopped_after(scheduler, use(scheduler))

    async def use(scheduler: LocalScheduler) -> None:
        assert [node.address for node in await scheduler.request(5)] == ["10.77.0.2"]
        await scheduler.start_agent("node1")
        await until(ready(tmp_path, "node1"))
        lines = (tmp_path / "agent-node1.log").read_text().splitlines()
        assert lines[0] == "10.77.0.2 eth0" and "inet 10.77.0.2/24" in lines[1]

    asyncio.run(body())


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from tests.operate.driver.scheduler.test_local import launch
from megascale.operate.driver.scheduler.local import LocalScheduler

async def main():
    scheduler = LocalScheduler(2, launch(Path(sys.argv[1]), sys.argv[2]))
    await scheduler.start_agent("node0")
    await scheduler.start_agent("node1")
    print(scheduler.launch, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_agents_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    program = "import time; print('ready', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), program]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # the tests', and the rigs'
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        name = supervisor.stdout.readline().strip()
        asyncio.run(until(lambda: ready(tmp_path, "node0")() and ready(tmp_path, "node1")()))
        agents = [*node_processes(name, "node0"), *node_processes(name, "node1")]
        assert len(agents) == 2
        supervisor.kill()
    asyncio.run(until(lambda: not any(process_exists(pid) for pid in agents)))


def test_a_driver_calls_the_scheduler_of_its_supervisor(tmp_path: Path) -> None:
    async def drive(scheduler: Scheduler, pid: Callable[[], int]) -> None:
        assert [node.address for node in await scheduler.nodes()] == ["127.0.0.1"] * 2
        await scheduler.start_agent("node0")
        waiting = asyncio.create_task(scheduler.next_end())
        with pytest.raises(SchedulerError, match="node9"):
            await scheduler.release("node9")
        await until(ready(tmp_path, "node0"))
        os.kill(pid(), signal.SIGKILL)
        assert (await waiting).node == "node0"
        await scheduler.exclude("node0", "test", None)
        await scheduler.release("node0")
        assert [node.name for node in await scheduler.request(1)] == ["node2"]

    async def use(scheduler: LocalScheduler) -> None:
        for _ in range(2):  # a driver that hangs up in the middle of a call, and its successor
            ours, its = socket.socketpair()
            server = asyncio.create_task(serve(scheduler, ours))
            client = await SchedulerClient.connect(its)
            waiting = asyncio.create_task(client.next_end())
            await client.nodes()
            await client.close()
            await server
            waiting.cancel()
        ours, its = socket.socketpair()
        server = asyncio.create_task(serve(scheduler, ours))
        client = await SchedulerClient.connect(its)
        await drive(client, lambda: scheduler.processes("node0")[0])
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        with pytest.raises(SchedulerError, match="has ended"):
            await client.nodes()
        await client.close()

    run(tmp_path, use)
