"""The agent of a node: parent of its ranks, which it starts, watches and ends at the driver's order.

The agent decides nothing. It reports ends of ranks at once and their states every second; it answers with flight
records, stacks and results of checks. Its ranks die with it. If the driver is lost the ranks go on training, and the
agent connects to the next driver and says what it runs; after `fault.agent_grace_s` without one it ends its ranks,
which save, and itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale.config.fault import FaultConfig
from megascale.core.errors import Exit, MegascaleError
from megascale.core.process import ORDER_WAIT_S, StopRequests, stop_signals
from megascale.operate.channel.agent_channel import AgentChannel
from megascale.operate.channel.handshake import NotAPeerError
from megascale.operate.channel.messages import (
    AgentMessage,
    Check,
    Collect,
    DriverMessage,
    Leave,
    OpenStore,
    Prepare,
    Start,
    Stop,
    Welcome,
)
from megascale.operate.channel.streams import Tls
from megascale.operate.health.host_metrics import HostMetrics
from megascale.operate.node.agent_exporter import AgentExporter
from megascale.operate.node.agent_ranks import AgentRanks, Observe
from megascale.operate.node.answers import check_node, read_records, take_stacks
from megascale.operate.node.node_exporter import METRICS_S
from megascale.operate.node.node_place import DRIVER_LOST, NodePlace
from megascale.operate.node.threads import call_in_thread

LOST_DRIVER_GRACE_S = 60.0
"""Seconds that the ranks have to save when no driver has come back."""

WAIT_NOTICE_S = 10.0
"""Seconds without a driver after which the agent says that it waits."""


class Agent:
    """The agent of a node. `secret`: the key of the job; `secret_descriptor`: from which ranks read the secret.

    `observe`: finds ranks of another launcher, which this agent only watches.
    """

    def __init__(
        self,
        place: NodePlace,
        secret: bytes,
        secret_descriptor: int,
        tls: Tls | None = None,
        observe: Observe | None = None,
    ) -> None:
        self._place = place
        self._settings = FaultConfig()
        self._channel = AgentChannel(place.driver, secret, self._greeting, tls)
        self._exporter = AgentExporter(place, lambda: self._channel.lost_s, _say)
        self._metrics = HostMetrics(Path.cwd())
        self._host: Mapping[str, float] = {}
        self._beat_now = asyncio.Event()
        self._ranks = AgentRanks(
            place, secret_descriptor, self._exporter, self._channel.send, self._beat_now.set, _say, observe
        )
        self._stop_requests = StopRequests()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until the driver lets the agent leave, a signal ends it, or the driver stays away; return the exit
        status.

        Raises: MegascaleError if the driver has another secret
        """
        loop = asyncio.get_running_loop()
        self._leaving: asyncio.Future[int] = loop.create_future()
        for number in stop_signals():
            loop.add_signal_handler(number, self._take_signal, number)
        try:
            async with self._channel:
                for job in (self._serve(), self._send_beats(), self._watch_ranks(), self._sample_metrics()):
                    self._spawn(job)
                return await self._leaving
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._ranks.close()
            self._exporter.close()

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        """Run a job beside the others; its failure ends the agent."""
        task = asyncio.ensure_future(job)
        self._tasks.add(task)
        task.add_done_callback(self._take_end)

    def _take_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._leaving.done():
            self._leaving.set_exception(error)

    def _greeting(self) -> list[AgentMessage]:
        """Return the first messages of a connection."""
        return self._ranks.greeting()

    async def _serve(self) -> None:
        try:
            async for message in self._channel:
                await self._take(message)
        except NotAPeerError as error:
            what = f"the driver at {self._place.driver}: {error}"
            raise MegascaleError(what, hint="give all agents the secret of the job's supervisor") from None

    async def _take(self, message: DriverMessage) -> None:
        match message:
            case Welcome():
                self._settings = self._settings.model_copy(
                    update={name: value for name, value in vars(message).items() if name in FaultConfig.model_fields}
                )
                self._exporter.start(message)
            case OpenStore() if not self._ranks.observes:
                self._spawn(self._ranks.open_store(message))
            case Prepare() if not self._ranks.observes:
                self._ranks.prepare(message)
            case Start() if not self._ranks.observes:
                if (ranks := await self._ranks.begin(message)) is not None:
                    self._spawn(self._ranks.start(ranks))
            case Stop():
                self._spawn(self._ranks.stop(message))
            case Collect():
                self._spawn(self._collect(message))
            case Check():
                self._spawn(self._check(message))
            case Leave():
                self._ranks.copies = message.copies
                self._spawn(self._leave(f"told to leave: {message.reason}", message.status, 0.0))
            case _:
                _say(f"an observer takes no {type(message).__name__}")

    async def _collect(self, order: Collect) -> None:
        if self._ranks.observes and self._ranks.present is not None:  # its count of attempts is this host's
            order = replace(order, attempt=self._ranks.present.attempt)
        self._channel.send(await read_records(self._ranks.present, order))
        if order.stacks:
            self._channel.send(await take_stacks(self._ranks.present, order))

    async def _check(self, order: Check) -> None:
        self._channel.send(await check_node(order, self._place.slots))

    async def _send_beats(self) -> None:
        """Send heartbeats, at once when a rank starts or ends."""
        while True:
            host, self._host = self._host or None, {}
            self._channel.send(self._ranks.heartbeat(host))
            self._beat_now.clear()
            try:
                await asyncio.wait_for(self._beat_now.wait(), self._settings.heartbeat_s)
            except TimeoutError:
                continue

    async def _watch_ranks(self) -> None:
        """Read the flight records, and watch for a driver that stays away."""
        waits = False
        while True:
            self._ranks.poll()
            lost_s = self._channel.lost_s
            if lost_s > WAIT_NOTICE_S and not waits:
                _say(f"waiting for the driver at {self._place.driver}")
            waits = lost_s > WAIT_NOTICE_S
            if lost_s > self._settings.agent_grace_s:
                lost = f"no driver at {self._place.driver} for {lost_s:.0f} s"
                await self._leave(lost, DRIVER_LOST, LOST_DRIVER_GRACE_S)
                return
            await asyncio.sleep(self._settings.poll_s)

    async def _sample_metrics(self) -> None:
        while True:
            try:
                self._host = self._exporter.host = await call_in_thread(self._metrics.sample, METRICS_S)
                self._ranks.add_host_metrics(self._host)
            except (TimeoutError, RuntimeError, OSError) as error:
                self._exporter.host = {}  # a dead host must not look as it did before
                _say(f"no metrics of the host: {str(error) or type(error).__name__}")
            await asyncio.sleep(METRICS_S)

    def _take_signal(self, number: int) -> None:
        if self._stop_requests.add(number, time.monotonic()):
            self._ranks.signalled = True
            self._beat_now.set()  # the driver takes a signal to all nodes for a request to stop
            self._spawn(self._heed_signal())

    async def _heed_signal(self) -> None:
        """Leave the job, unless the driver, which may have got the signal too, orders the ranks to save and end. Ranks
        that save would stop the job: else they do so without a driver alone, and until a second request.
        """
        first = self._stop_requests.count == 1
        if first and not self._channel.lost_s and not self._ranks.observes:
            await asyncio.sleep(ORDER_WAIT_S)
            if self._ranks.job_stops:
                return
        saves = first and self._channel.lost_s > 0
        await self._leave("stopped by a signal", Exit.STOPPED, self._settings.stop_grace_s if saves else 0.0)

    async def _leave(self, reason: str, status: int, grace_s: float) -> None:
        _say(reason)
        await self._ranks.leave(grace_s)
        if not self._leaving.done():
            self._leaving.set_result(int(status))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # its log is in the run's folder
        print(f"megascale agent: {text}", file=sys.stderr, flush=True)


def leave_process(status: int) -> None:
    """End this process at once, whatever its threads wait for: a call to a sick device may never return."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
