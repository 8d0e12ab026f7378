"""A scripted driver, and agents as processes whose ranks import no torch: they write flight records, and do as told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from megascale.core.network import LOOPBACK
from megascale.core.run_folder import RunFolder
from megascale.operate.channel.driver_server import DriverServer
from megascale.operate.channel.ends import Disconnected
from megascale.operate.channel.messages import (
    AgentMessage,
    Heartbeat,
    Hello,
    OpenStore,
    RankEnd,
    RanksEnded,
    Start,
    StoreOpened,
)
from megascale.operate.channel.secret import (
    DESCRIPTOR_VARIABLE,
    SECRET_VARIABLE,
    job_secret,
    new_secret,
    secret_descriptor,
)
from megascale.operate.node.node_ranks import records_name
from megascale.record.log_files import log_path, remove_left_logs
from tests.jobs import heed_signals, lives

SECONDS = 300.0
M = TypeVar("M")

RANK = """
import os, signal, sys, time
from pathlib import Path

if "RANK" in os.environ and "MEGASCALE_FLIGHT_RECORD" in os.environ:
    from megascale.core.errors import LostPeerError
    from megascale.record.layout import Phase
    from megascale.record.log_files import folder_key
    from megascale.record.log import LogIdentity, open_log
    from megascale.core.process import STOP_ORDER
    from megascale.core.rank import rank_from_environment
    from megascale.operate.node.failure import write_end, write_error

    rank = rank_from_environment()
    folder = Path(os.environ["TOLD"])
    run, attempt = Path(os.environ.get("RUN", "run")), int(os.environ["MEGASCALE_ATTEMPT"])
    record = open_log(
        LogIdentity(run.name, rank.rank, rank.world_size, attempt, folder_key(run)),
        Path(os.environ["MEGASCALE_FLIGHT_RECORD"]),
    )
    asked = []
    signal.signal(STOP_ORDER, lambda *_: asked.append(1))
    (folder / f"environment-{rank.rank}").write_text(repr(dict(os.environ)))
    print("rank", rank.rank, "prints", flush=True)
    record.set_phase(Phase.STEP)
    step = 0
    while True:
        step += 1
        record.begin_step(step)
        time.sleep(0.02)
        record.end_step(0.02, {"tokens": 1.0})
        if asked and "deaf" not in os.environ:
            write_end(rank, 143)
            os._exit(143)
        order = folder / f"rank-{rank.rank}"
        if order.exists():
            what = order.read_text()
            if what == "raise":
                error = ValueError("a bad value")
                write_error(error, rank)
                print("Traceback (most recent call last):\\nValueError: a bad value", file=sys.stderr, flush=True)
                os._exit(1)
            if what == "lose":
                write_error(LostPeerError("lost rank 1", peers=[1]), rank)
                os._exit(1)
            if what == "full":
                print("OSError: [Errno 28] No space left on device", file=sys.stderr, flush=True)
                os._exit(4)
            if what == "unreadable":
                Path(os.environ["MEGASCALE_ERROR_FILE"]).mkdir()
                os._exit(1)
            if what == "end":
                write_end(rank, 0)
                os._exit(0)
            if what == "deaf":
                os.environ["deaf"] = "1"
            if what == "hear":
                os.environ.pop("deaf", None)
"""
"""sitecustomize.py of a rank."""


class Node:
    """An agent's process. `folder`: of the test; ranks are told what to do by files in it (`tell`)."""

    def __init__(self, folder: Path, driver: str, secret: str, name: str = "n0", **env: str) -> None:
        self.folder = folder
        self.secret = secret
        self.name = name
        variables = planted(folder) | {"MEGASCALE_NODE": name}
        variables |= {"MEGASCALE_NODE_ADDRESS": LOOPBACK, "MEGASCALE_DRIVER": driver}
        self.log = folder / f"agent-{name}.log"
        with open(self.log, "ab") as output, secret_descriptor(secret) as descriptor:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megascale", "agent", *env.pop("arguments", "").split()],
                env=variables | {DESCRIPTOR_VARIABLE: str(descriptor)} | env,
                stdout=output,
                stderr=output,
                pass_fds=[descriptor],
                preexec_fn=heed_signals,
            )

    def tell(self, rank: int, what: str) -> None:
        """Have a rank do something."""
        temporary = self.folder / f"new-{rank}"
        temporary.write_text(what)
        temporary.replace(self.folder / f"rank-{rank}")

    async def ended(self) -> int:
        """Wait for the agent's end, and return its status."""
        return await within(asyncio.to_thread(self.process.wait))

    def kill(self) -> None:
        """Kill the agent, whatever it does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def planted(folder: Path) -> dict[str, str]:
    """The environment of an agent or a launcher whose ranks are those of this module."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(RANK)
    found = {name: value for name, value in os.environ.items() if not name.startswith("MEGASCALE")}
    path = os.pathsep.join([str(site), str(Path(__file__).parents[3])])
    return found | {"OMP_NUM_THREADS": "1", "TOLD": str(folder), "PYTHONPATH": path}


def rank_environment(folder: Path, run: str, rank: int, logs: Path) -> dict[str, str]:
    """The environment of one of two ranks of a launcher without an agent."""
    logs.mkdir(parents=True, exist_ok=True)
    return planted(folder) | {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "RUN": str(folder / run),
        "MEGASCALE_ATTEMPT": "0",
        "MEGASCALE_FLIGHT_RECORD": str(log_path(run, time.time_ns(), rank)),
        "MEGASCALE_ERROR_FILE": str(logs / "rank-%t.error.json"),
    }


class Driver:
    """A scripted driver. `said`: all messages so far, as (node, message)."""

    def __init__(self, server: DriverServer) -> None:
        self.server = server
        self.said: list[tuple[str, AgentMessage | Disconnected]] = []

    async def until(self, kind: type[M], holds: Callable[[M], object] = lambda _: True, node: str = "n0") -> M:
        """Return the next message of a kind for which `holds`."""

        async def find() -> M:
            async for sender, message in self.server:
                self.said.append((sender, message))
                if isinstance(message, kind) and sender == node and holds(message):
                    return message
            raise AssertionError

        return await within(find())

    def send(self, message: Any, node: str = "n0") -> None:
        """Send an order."""
        assert self.server.send(node, message), f"{node} is not connected"

    async def start(
        self, folder: Path, ranks: tuple[int, ...] = (0, 1), attempt: int = 1, run: RunFolder | None = None
    ) -> dict[int, int]:
        """Start ranks on n0, and return their process ids once all of them train. `run`: the run's folder."""
        self.send(OpenStore(attempt))
        store = await self.until(StoreOpened, lambda opened: opened.attempt == attempt)
        logs = folder / "logs" / f"attempt-{attempt}"
        env = {"GREETING": "hi"}
        self.send(Start(attempt, "run", len(ranks), ranks, store.address, ("--version",), str(logs), env, run))
        return await self.training(ranks)

    async def training(self, ranks: tuple[int, ...] = (0, 1)) -> dict[int, int]:
        """Wait until ranks train, and return their process ids."""

        def train(beat: Heartbeat) -> bool:
            return len(beat.ranks) == len(ranks) and all(status.step > 1 for status in beat.ranks)

        beat = await self.until(Heartbeat, train)
        return {status.rank: status.pid for status in beat.ranks}

    async def end_of(self, *ranks: int, attempt: int | None = None) -> dict[int, RankEnd]:
        """Wait until ends of all these ranks were reported, of any attempt or one."""
        ends: dict[int, RankEnd] = {}

        def take(message: RanksEnded) -> bool:
            if attempt in (None, message.attempt):
                ends.update({end.rank: end for end in message.ends})
            return ends.keys() >= set(ranks)

        await self.until(RanksEnded, take)
        return ends


async def within(awaitable: Awaitable[M], seconds: float = SECONDS) -> M:
    """Wait for a result, not forever."""
    return await asyncio.wait_for(awaitable, seconds)


@asynccontextmanager
async def driver(secret: str, port: int = 0) -> AsyncIterator[Driver]:
    """A driver that listens."""
    async with DriverServer(key_of(secret), port=port) as server:
        yield Driver(server)


@asynccontextmanager
async def node(folder: Path, **env: str) -> AsyncIterator[tuple[Driver, Node]]:
    """A driver and an agent that has joined."""
    secret = new_secret()
    async with driver(secret) as ours:
        agent = Node(folder, ours.server.address, secret, **env)
        try:
            await ours.until(Hello)
            yield ours, agent
        finally:
            agent.kill()
            while flight_records(name := records_name("run", agent.name)):
                remove_left_logs(name)


def flight_records(name: str = "run@n0") -> list[Path]:
    """The flight records of the ranks of a node."""
    pattern = log_path(name, 0, 0)
    return sorted(pattern.parent.glob(pattern.name.replace("-0-00000.", "-*-*.")))


def key_of(secret: str) -> bytes:
    """The key that follows from a secret's text."""
    return job_secret(None, {SECRET_VARIABLE: secret})


async def gone(pids: list[int], seconds: float = 10.0) -> float:
    """Wait until processes have ended, and return the seconds it took."""
    start = time.monotonic()
    while any(lives(pid) for pid in pids):
        assert time.monotonic() - start < seconds, f"of {pids} some live"
        await asyncio.sleep(0.01)
    return time.monotonic() - start


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine, not forever."""
    asyncio.run(within(test()))
