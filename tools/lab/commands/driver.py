"""Cost of the driver: the share of a core that the heartbeats of many agents take, and the merge of all ranks' states.

    .venv/bin/python tools/lab driver --agents 1500 --ranks 8 --seconds 20

Simulated agents of other processes connect to a driver of this process as real ones do, start no ranks, and send a
heartbeat of all their ranks each second. Measured: processor time of the driver's process. The second figure is the
time in which the driver takes one heartbeat of every agent, without the network.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lab import LAB
from lab.simulation import Simulation
from megascale.config.fault import FaultConfig
from megascale.core.append_file import AppendFile
from megascale.core.errors import Exit
from megascale.operate.channel.agent_channel import AgentChannel
from megascale.operate.channel.driver_server import DriverServer
from megascale.operate.channel.messages import (
    DriverMessage,
    Heartbeat,
    Hello,
    Message,
    OpenStore,
    Start,
    StoreOpened,
    from_json,
    to_json,
)
from megascale.operate.channel.secret import DESCRIPTOR_VARIABLE, job_secret, new_secret, secret_descriptor
from megascale.operate.driver.driver import Clock, Driver
from megascale.operate.driver.incidents import JobHistory
from megascale.operate.driver.job import Job
from megascale.operate.driver.job_state import JobPlan
from megascale.operate.driver.scheduler.none import NoScheduler
from megascale.record.rank_state import RankStatus

AGENTS_PER_PROCESS = 250
JOIN_S = 120.0
WARM_UP_S = 5.0


def statuses(ranks: Sequence[int], step: int) -> tuple[RankStatus, ...]:
    """Return the states of healthy ranks."""
    return tuple(
        RankStatus(rank, 1000 + rank, "step", step, 100 * step, 0.1, 0.1, 1.0, 1, state="R", rss=1 << 30)
        for rank in ranks
    )


class SimulatedAgent:
    """An agent that answers the driver's orders, starts no ranks, and sends heartbeats of theirs."""

    def __init__(self, address: str, secret: bytes, number: int) -> None:
        self._number = number
        node = f"node{number:05d}"
        self._channel = AgentChannel(address, secret, lambda: [Hello(node, node, "127.0.0.1", 8)])
        self._start: Start | None = None

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self._channel:
            beats = asyncio.ensure_future(self._beat())
            async for message in self._channel:
                self._take(message)
            await beats

    def _take(self, message: DriverMessage) -> None:
        if isinstance(message, OpenStore):
            self._channel.send(StoreOpened(message.attempt, "127.0.0.1:1"))
        elif isinstance(message, Start):
            self._start = message

    async def _beat(self) -> None:
        step = 0
        await asyncio.sleep(self._number % 100 / 100)  # agents are not in step
        while True:
            step += 1
            ranks = self._start.ranks if self._start is not None else ()
            attempt = self._start.attempt if self._start is not None else None
            self._channel.send(Heartbeat(time.time(), attempt, statuses(ranks, step)))
            await asyncio.sleep(1.0)


async def run_agents(address: str, first: int, count: int) -> None:
    """Run simulated agents until this process is killed."""
    secret = job_secret(None)
    await asyncio.gather(*(SimulatedAgent(address, secret, first + index).run() for index in range(count)))


async def measure(options: argparse.Namespace, processes: list[subprocess.Popen]) -> None:
    """Start agents, let all of them join, and print the driver's share of a core."""
    count, settings = options.agents, FaultConfig(check_nodes=False)
    plan = JobPlan("bench", count, count * options.ranks, (), "/")
    clock = Clock()
    job = Job(plan, settings, JobHistory(), clock.now())
    text = new_secret()
    with secret_descriptor(text) as descriptor:
        os.environ[DESCRIPTOR_VARIABLE] = str(descriptor)
        async with DriverServer(job_secret(None)) as server:
            for first in range(0, count, AGENTS_PER_PROCESS):
                size = min(AGENTS_PER_PROCESS, count - first)
                words = [sys.executable, LAB, "driver", "--serve", server.address, str(first), str(size)]
                processes.append(subprocess.Popen(words, pass_fds=[descriptor]))
            driver = Driver(job, server, NoScheduler(), AppendFile(Path(os.devnull)), clock)
            running = asyncio.ensure_future(driver.run())
            deadline = time.monotonic() + JOIN_S
            while job.attempt is None or not job.attempt.watch.has_new_step:
                if running.done() or time.monotonic() > deadline:
                    raise SystemExit(f"{len(server.agents)} of {count} agents joined within {JOIN_S:.0f} s")
                await asyncio.sleep(0.1)
            await asyncio.sleep(WARM_UP_S)
            beats, cpu, wall = job.heartbeats, time.process_time(), time.monotonic()
            await asyncio.sleep(options.seconds)
            cpu, wall, beats = time.process_time() - cpu, time.monotonic() - wall, job.heartbeats - beats
            print(f"{count} agents, {count * options.ranks} ranks: {beats / wall:.0f} heartbeats a second")
            print(f"driver: {cpu / wall:.1%} of a core, {1e6 * cpu / max(beats, 1):.0f} us a heartbeat; {job.stage}")
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def merge_seconds(nodes: int, ranks: int) -> float:
    """Return the seconds of processor time in which a driver takes the bytes of a heartbeat of every node."""
    sim = Simulation(JobPlan("bench", nodes, nodes * ranks, (), "/"), FaultConfig(), 0)
    sim.run(300.0)
    assert sim.job.attempt is not None
    placed = sim.job.attempt.placement.items()
    beats: list[tuple[str, Message]] = [(node, Heartbeat(0.0, 0, statuses(mine, 50))) for node, mine in placed]
    wire = [(node, to_json(beat)) for node, beat in beats]
    start = time.process_time()
    for node, data in wire:
        message = from_json(data)
        assert isinstance(message, Heartbeat)
        sim.job.receive(node, message, sim.now)
    return time.process_time() - start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)  # simulated agents of the driver at an address
    parser.add_argument("--agents", type=int, default=1500)
    parser.add_argument("--ranks", type=int, default=8, help="ranks of an agent (8)")
    parser.add_argument("--seconds", type=float, default=20.0)


def run(options: argparse.Namespace) -> int:
    """Run the measurements."""
    if options.serve:
        address, first, count = options.serve
        asyncio.run(run_agents(address, int(first), int(count)))
        return Exit.OK
    print(
        f"states of {1536 * 8} ranks merged in {min(merge_seconds(1536, 8) for _ in range(3)):.2f} s of processor time",
        flush=True,
    )
    processes: list[subprocess.Popen] = []
    try:
        asyncio.run(measure(options, processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Exit.OK
