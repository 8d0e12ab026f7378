"""The agent of a node: parent of its ranks, which it starts, watches and ends at the driver's order.

The agent decides nothing. It reports ends of ranks at once and their states every second; it answers with flight
records, stacks and results of checks. Its ranks die with it. If the driver is lost the ranks go on training, and the
agent connects to the next driver and says what it runs; after `fault.agent_grace_s` without one it ends its ranks,
which save, and itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from megascale.config.fault import FaultConfig
from megascale.core.errors import Exit
from megascale.core.outages import Outages
from megascale.core.process import ORDER_WAIT_S, StopRequests, stop_signals
from megascale.operate.channel.ends import AgentEnd, Greeting
from megascale.operate.channel.messages import (
    Check,
    Collect,
    DriverMessage,
    Leave,
    OpenStore,
    Prepare,
    Records,
    Stacks,
    Start,
    Stop,
    Welcome,
)
from megascale.operate.node.agent_exporter import AgentExporter
from megascale.operate.node.agent_ranks import AgentRanks, Observe
from megascale.operate.node.ranks import DRIVER_LOST, NodePlace
from megascale.operate.node.threads import call_in_thread

LOST_DRIVER_GRACE_S = 60.0  # seconds that the ranks have to save when no driver has come back
METRICS_S = 5.0  # seconds between samples of the host's metrics, and seconds that a sample may take
FIRST_SAMPLE_S = 0.5  # seconds before the first sample of the host's metrics: ranks start first
WAIT_NOTICE_S = 10.0  # seconds without a driver after which the agent says that it waits


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # its log is in the run's folder
        print(f"megascale agent: {text}", file=sys.stderr, flush=True)


class Agent:
    """The agent of a node. `connect`: makes its end of the connection to the driver; `secret_descriptor`: from which
    ranks read the secret.

    `observe`: finds ranks of another launcher, which this agent only watches. `say`: prints a line for people.
    """

    def __init__(
        self,
        place: NodePlace,
        connect: Callable[[Greeting], AgentEnd],
        secret_descriptor: int,
        observe: Observe | None = None,
        say: Callable[[str], None] = _say,
    ) -> None:
        self._place = place
        self._say = say
        self._settings = FaultConfig()
        self._channel = connect(lambda: self._ranks.greeting())  # noqa: PLW0108  they are made below
        self._exporter = AgentExporter(place, lambda: self._channel.lost_s, say)
        self._outages = Outages()
        self._host: Mapping[str, float] = {}
        self._beat_now = asyncio.Event()
        self._ranks = AgentRanks(
            place, secret_descriptor, self._exporter, self._channel.send, self._beat_now.set, say, observe
        )
        self._stop_requests = StopRequests()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, *, heeds_signals: bool = True) -> int:
        """Serve until the driver lets the agent leave, a signal ends it, or the driver stays away; return the exit
        status. `heeds_signals`: False if this process has a driver, which does.

        Raises: NotAPeerError if the driver has another secret
        """
        loop = asyncio.get_running_loop()
        self._leaving: asyncio.Future[int] = loop.create_future()
        for number in stop_signals() if heeds_signals else ():
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

    async def _serve(self) -> None:
        async for message in self._channel:
            await self._take(message)

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
                reason = f"told to leave: {message.reason}" if message.reason else ""
                self._spawn(self._leave(reason, message.status, 0.0))
            case _:
                self._say(f"an observer takes no {type(message).__name__}")

    async def _collect(self, order: Collect) -> None:
        from megascale.operate.node.answers import read_records, take_stacks

        ranks = self._ranks.present
        if ranks is None or not (self._ranks.observes or ranks.attempt == order.attempt):
            self._channel.send(Records(order.attempt, {}, {}))
            if order.stacks:
                self._channel.send(Stacks(order.attempt, {}))
            return
        order = replace(order, attempt=ranks.attempt)  # an observer's count of attempts is this host's
        self._channel.send(await read_records(ranks, order))
        if order.stacks:
            self._channel.send(await take_stacks(ranks, order))

    async def _check(self, order: Check) -> None:
        from megascale.operate.node.answers import check_node

        self._channel.send(await check_node(order, self._place.slots))

    async def _send_beats(self) -> None:
        """Send heartbeats, at once when a rank starts or ends."""
        while True:
            host, self._host = self._host or None, {}
            self._channel.send(self._ranks.heartbeat(host))
            self._beat_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.heartbeat_s):  # as in `call_in_thread`
                    await self._beat_now.wait()

    async def _watch_ranks(self) -> None:
        """Read the flight records, and watch for a driver that stays away."""
        waits = False
        while True:
            self._ranks.poll()
            lost_s = self._channel.lost_s
            if lost_s > WAIT_NOTICE_S and not waits:
                self._say(f"waiting for the driver at {self._place.driver}")
            waits = lost_s > WAIT_NOTICE_S
            if lost_s > self._settings.agent_grace_s:
                lost = f"no driver at {self._place.driver} for {lost_s:.0f} s"
                await self._leave(lost, DRIVER_LOST, LOST_DRIVER_GRACE_S)
                return
            await asyncio.sleep(self._settings.poll_s)

    async def _sample_metrics(self) -> None:
        await asyncio.sleep(FIRST_SAMPLE_S)
        from megascale.operate.health.host_metrics import HostMetrics

        metrics: HostMetrics | None = None
        while True:
            try:
                if metrics is None:  # in a thread: a disk or a GPU may hang
                    metrics = await call_in_thread(functools.partial(HostMetrics, self._place.folder), METRICS_S)
                self._host = self._exporter.host = await call_in_thread(metrics.sample, METRICS_S)
                self._ranks.add_host_metrics(self._host)
                self._outages.ends("sample")
            except (TimeoutError, RuntimeError, OSError, ValueError) as error:
                self._exporter.host = {}  # a dead host must not look as it did before
                if self._outages.begins("sample"):
                    self._say(f"WARNING: no metrics of the host: {error!r}; tried again every {METRICS_S:g} s")
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
        if reason:
            self._say(reason)
        await self._ranks.leave(grace_s)
        if not self._leaving.done():
            self._leaving.set_result(int(status))
