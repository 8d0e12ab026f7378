"""A node that is replaced: its copies in memory are removed, and those of other nodes on its host stay."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from megascale.checkpoint.memory.copies import CopyFolder
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.core.errors import Exit
from megascale.core.network import LOOPBACK, reserve_port
from megascale.core.rank import NODE_VARIABLE
from megascale.core.run_folder import RunFolder
from megascale.operate.channel.agent_channel import AgentChannel
from megascale.operate.channel.driver_server import DriverServer
from megascale.operate.channel.messages import Hello, Leave, Welcome
from megascale.operate.driver.drive_job import drive_job
from megascale.operate.driver.incidents import LOG_FILE
from megascale.operate.driver.job_state import JobPlan
from megascale.operate.driver.scheduler.none import NoScheduler
from megascale.operate.node.stored_copies import RUN_FILE, remove_copies
from tests.operate.driver.launched import launch_config
from tests.operate.health.nodes import node, run, within

SECRET = b"x" * 32


def make_copies(memory: Path, run: Path, name: str) -> Path:
    """Make the folder of copies of a node as its ranks do, with a copy."""
    folder = CopyFolder(memory, "id", run.resolve() / ".memory", {NODE_VARIABLE: name})
    folder.create()
    folder.copy_path(0, 0).write_bytes(b"state")
    return folder.path


@pytest.mark.parametrize("replaced", [True, False])
def test_an_agent_removes_the_copies_of_its_node_alone(replaced: bool, tmp_path: Path) -> None:
    mine, other = (make_copies(tmp_path / "memory", tmp_path, name) for name in ("n0", "n1"))

    async def test() -> None:
        async with node(tmp_path) as (ours, agent):
            await ours.start(tmp_path, (0,))
            ours.send(Leave("replaced", copies=str(mine)) if replaced else Leave("the job has ended"))
            assert await agent.ended() == Exit.OK

    run(test)
    assert mine.exists() is not replaced
    assert sorted(path.name for path in other.iterdir()) == ["rank-00000.a", RUN_FILE]


def test_the_last_copies_of_a_host_leave_nothing(tmp_path: Path) -> None:
    remove_copies(make_copies(tmp_path / "memory", tmp_path, "n0"))
    assert not list((tmp_path / "memory").iterdir())


@contextlib.asynccontextmanager
async def driven(config: RunConfig, folder: RunFolder | None) -> AsyncIterator[str]:
    """The address of the driver of a job in `folder`."""
    plan = JobPlan("run", 1, 1, (), str(config.folder / "logs"), revivable=False, folder=str(config.folder))
    with reserve_port() as reserved:
        listen = LOOPBACK, reserved.getsockname()[1]
        server = DriverServer(SECRET, *listen)
        driving = asyncio.ensure_future(drive_job(plan, config.fault, NoScheduler(), server, folder=folder))
        try:
            yield f"{listen[0]}:{listen[1]}"
        finally:
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)


@pytest.mark.parametrize("has_copies", [True, False])
def test_the_driver_tells_a_replaced_node_where_its_copies_are(has_copies: bool, tmp_path: Path) -> None:
    """A node that was cut off comes back."""
    (tmp_path / "memory").mkdir()
    config = load_config(str(launch_config(tmp_path)), [f"checkpoint.in_memory_dir={tmp_path / 'memory'}"])
    config.folder.mkdir(parents=True)
    launch = {"event": "launch", "time": 1.0, "run": "test", "nodes": 1, "world": 1, "scheduler": "slurm"}
    excluded = {"event": "excluded", "time": 2.0, "node": "n/1", "reason": "", "until": time.time() + 1000}
    (config.folder / LOG_FILE).write_text("".join(json.dumps(event) + "\n" for event in (launch, excluded)))
    memory = str(tmp_path / "memory")
    folder = RunFolder(str(config.folder), "id\nstart", "", memory, 0.0) if has_copies else None

    async def say_hello(address: str, name: str) -> object:
        hello = Hello(name, "host", LOOPBACK, 1, started=1.0)
        async with AgentChannel(address, SECRET, lambda: [hello]) as agent:
            return await anext(agent)

    async def test() -> None:
        async with driven(config, folder) as address:
            assert isinstance(await within(say_hello(address, "n2")), Welcome)
            told = await within(say_hello(address, "n/1"))
        copies = str(make_copies(tmp_path / "memory", config.folder, "n/1")) if has_copies else ""
        assert told == Leave("node n/1 was replaced", copies=copies)

    run(test)
