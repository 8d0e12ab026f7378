"""The Slurm scheduler on a real cluster: slurmctld, and a slurmd for each of four nodes of this host."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale.fault.scheduler.port import AgentLaunch, Node, SchedulerError
from megascale.fault.scheduler.slurm import SlurmScheduler, allocation_nodes, this_node
from tests.launch.slurm import Slurm, missing

ROOT = Path(__file__).parents[3]
SECONDS = 60


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := missing():
        pytest.skip(reason)
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster", nodes=4, slurmd_timeout=10) as cluster:
        yield cluster


DRIVER = """
import asyncio, os, sys
from pathlib import Path
from megascale.fault.scheduler.port import AgentLaunch
from megascale.fault.scheduler.slurm import SlurmScheduler, allocation_nodes, this_node

AGENT = '''
import os, time
secret = os.environ["MEGASCALE_JOB_SECRET"]
print(*map(os.environ.get, ("MEGASCALE_NODE", "SLURMD_NODENAME", "MEGASCALE_DRIVER")), len(secret), flush=True)
time.sleep(600)
'''

async def main():
    allocation = allocation_nodes()
    agent = AgentLaunch(this_node(allocation).address + ":4000", "5" * 64, Path("logs"), [sys.executable, "-c", AGENT])
    scheduler = SlurmScheduler(3, agent, allocation)
    for node in await scheduler.nodes():
        await scheduler.start_agent(node.name)
    print("started", this_node(allocation).name, flush=True)
    lost = await told()
    await scheduler.exclude(lost, "no heartbeat", None)
    await scheduler.release(lost)
    (new,) = await scheduler.request(1)
    assert not await scheduler.request(1)
    await scheduler.start_agent(new.name)
    print("replaced", lost, new.name, flush=True)
    await told()
    await scheduler.stop(False)
    print("stopped", flush=True)

async def told():
    while not (words := sorted(Path().glob("tell-*"))):
        await asyncio.sleep(0.05)
    words[0].unlink()
    return words[0].name.removeprefix("tell-")

asyncio.run(main())
"""


def wait_for(done: Callable[[], object], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def test_a_dead_node_is_replaced_by_a_spare_node_of_the_allocation(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{sys.executable} driver.py\n")
    successor = slurm.submit("--hold", "--nodes=3", "--wrap=true", folder=tmp_path)
    env = {"PYTHONPATH": str(ROOT), "MEGASCALE_SUCCESSOR": successor}
    job = slurm.submit("--no-kill", "--nodes=4", "--output=out", str(script), folder=tmp_path, env=env)

    def output() -> str:
        return (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""

    def agent(node: str) -> str:
        log = tmp_path / "logs" / f"agent-{node}.log"
        return log.read_text() if log.exists() else ""

    wait_for(lambda: all(" 64\n" in agent(node) for node in ("n0", "n1", "n2")), output)
    assert agent("n1").splitlines()[-1] == "n1 n1 127.0.0.1:4000 64" and not agent("n3")
    slurm.kill_node("n1")
    (tmp_path / "tell-n1").touch()
    wait_for(lambda: "n3 n3" in agent("n3"), output)
    assert "replaced n1 n3" in output()
    assert slurm.state(successor)["ExcNodeList"] == "n1"
    assert slurm.state(job)["JobState"] == "RUNNING"
    (tmp_path / "tell-stop").touch()
    wait_for(lambda: "stopped" in output(), output)
    assert slurm.end(successor)[0] == "CANCELLED"
    slurm.restart_node("n1")
    assert slurm.end(job) == ("COMPLETED", "0:0")
    assert not [pid for node in slurm.nodes for pid in slurm.processes(node)]


def test_outside_of_an_allocation(tmp_path: Path) -> None:
    with pytest.raises(SchedulerError, match="SLURM_JOB_NODELIST"):
        allocation_nodes({"SLURM_JOB_ID": "7"})
    nodes = [Node("n0", "n0"), Node("n1", "n1")]
    assert this_node(nodes, {"SLURMD_NODENAME": "n1"}).name == "n1" and this_node(nodes, {}).name == "n0"
    with pytest.raises(SchedulerError, match="3 nodes of an allocation of 2"):
        SlurmScheduler(3, AgentLaunch("n0:1", "5" * 64, tmp_path), nodes)
