"""The ranks of an agent's node, over the attempts of a job: started and ended at the driver's order, and reported.

With the ranks of an attempt go the socket of the job's store, if rank 0 is among them, and the collector of their
events.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.core.errors import CheckpointError
from megascale.operate.channel.messages import (
    AgentMessage,
    Heartbeat,
    Hello,
    OpenStore,
    Prepare,
    RankEnd,
    RanksEnded,
    Start,
    Stop,
)
from megascale.operate.node.agent_exporter import AgentExporter
from megascale.operate.node.node_ranks import NodeRanks
from megascale.operate.node.ranks import NodePlace, Ranks
from megascale.operate.node.store_listener import StoreListener
from megascale.operate.node.threads import call_in_thread

if TYPE_CHECKING:
    from megascale.operate.node.standby_process import StandbyProcess
    from megascale.operate.store.collector import CollectorThread

COLLECTOR_S = 11.0  # seconds that the agent waits at most for the event store
COPIES_S = 30.0  # seconds that the removal of copies in memory may take

Observe = Callable[[Callable[[RankEnd], None]], Ranks]
"""Function (what to call with each end of a rank): find the ranks of another launcher."""


class AgentRanks:
    """The ranks of the present attempt on the node at `place`. `secret_descriptor`: from which ranks read the secret.

    `send` sends a message to the driver; `changed` is called when a rank has started or ended. `observe`: finds ranks
    of another launcher, which are only watched. `copies`: the folder of the run's copies in memory if they are to be
    removed, "" to keep them. `signalled`: the agent has got a stop signal; `job_stops`: the driver has let the ranks
    save.
    """

    def __init__(
        self,
        place: NodePlace,
        secret_descriptor: int,
        exporter: AgentExporter,
        send: Callable[[AgentMessage], object],
        changed: Callable[[], object],
        say: Callable[[str], None],
        observe: Observe | None = None,
    ) -> None:
        self._place = place
        self._secret_descriptor = secret_descriptor
        self._exporter = exporter
        self._send = send
        self._changed = changed
        self._say = say
        self._started = time.time()
        self._store = StoreListener(place.address)
        self._collector: CollectorThread | None = None
        self._standby: list[StandbyProcess] = []
        self.copies = ""
        self.signalled = self.job_stops = False
        self._in_use: FileIO | None = None
        self._held = Path()
        self.observes = observe is not None
        self.present: Ranks | None = observe(self._report_end) if observe else None
        if self.present is not None and place.alone:
            self._begin_collector(self.present)

    def greeting(self) -> list[AgentMessage]:
        """Return the first messages of a connection: what runs here, and what an earlier driver may have missed."""
        place, ranks = self._place, self.present
        attempt, running = (None, ()) if ranks is None else (ranks.attempt, ranks.running)
        said: list[AgentMessage] = [
            Hello(
                place.node, socket.gethostname(), place.address, place.slots, attempt, running,
                observer=self.observes, run=place.run, started=self._started,
            )
        ]  # fmt: skip
        if (opened := self._store.opened) is not None:
            said.append(opened)
        if ranks is not None and ranks.ends:
            said.append(RanksEnded(ranks.attempt, tuple(ranks.ends.values())))
        if running:
            said.append(self.heartbeat(None))  # a new driver knows the present step before it decides
        return said

    async def open_store(self, order: OpenStore) -> None:
        """Open the socket of an attempt's store, and report it."""
        await self._store.open(order, self._say)
        opened = self._store.opened
        if opened is not None and opened.attempt == order.attempt:
            self._send(opened)

    def prepare(self, order: Prepare) -> None:
        """Have processes in standby, for the ranks of the next attempt."""
        from megascale.operate.node.standby_process import StandbyProcess

        if any(not process.waits for process in self._standby) or len(self._standby) not in (0, order.processes):
            self._end_standby()
        try:
            while len(self._standby) < order.processes:
                self._standby.append(StandbyProcess(order.processes))
        except OSError as error:
            self._say(f"no process in standby: {error}")

    def _end_standby(self) -> None:
        while self._standby:
            self._standby.pop().close()

    async def begin(self, order: Start) -> NodeRanks | None:
        """Begin an attempt, whose ranks do not run yet; None for one that has begun before. Ranks of an earlier one are
        killed: a place never has two owners.
        """
        if self.present is not None:
            if self.present.attempt >= order.attempt:
                self._report_ends()
                return None
            await self.present.stop(0)
            await self._end_collector(wait=False)
            self.present.close()
        ranks = self.present = NodeRanks(order, self._place, self._secret_descriptor, self._report_end)
        if len(self._standby) != len(order.ranks):  # they share the cores among another number of ranks
            self._end_standby()
        return ranks

    async def start(self, ranks: NodeRanks) -> None:
        """Start the ranks of an attempt that has begun, once the run's folder is there. Copies in memory are in use as
        long as the agent lives: the next attempt may resume from them.
        """
        if (folder := ranks.order.folder) and folder.memory:
            from megascale.operate.node.stored_copies import hold_copies

            before, held = self._in_use, folder.copies(self._place.node)
            with contextlib.suppress(TimeoutError, RuntimeError, CheckpointError):  # ranks say why they cannot
                self._in_use = await call_in_thread(lambda: hold_copies(held, Path(folder.path)), COPIES_S)
                self._held = held
            if before is not None and before is not self._in_use:
                before.close()
        await ranks.start(self._store.socket_of(ranks.attempt), self._standby)
        if self.present is not ranks:  # another attempt has begun meanwhile
            return
        self._end_standby()
        self._begin_collector(ranks)  # ranks do not wait for it
        self._store.close()
        self._changed()

    async def stop(self, order: Stop) -> None:
        """End the ranks of an attempt, and report all ends."""
        ranks = self.present
        if ranks is None or ranks.attempt != order.attempt or self.observes:
            self._send(RanksEnded(order.attempt, ()))
            return
        self.job_stops |= order.save
        self._report_ends(stuck=await ranks.stop(order.grace_s, save=order.save))

    async def leave(self, grace_s: float) -> None:
        """End the ranks of any attempt, which save if they have time to, and report all ends."""
        if self.present is not None and not self.observes:
            self._report_ends(stuck=await self.present.stop(grace_s, save=grace_s > 0))

    def poll(self) -> None:
        """Read the heads of the flight records of the running ranks."""
        if self.present is not None:
            self.present.poll()

    def heartbeat(self, host: Mapping[str, float] | None) -> Heartbeat:
        """Return the states of the running ranks as a message. `host`: a new sample of the host's metrics, or None."""
        if (ranks := self.present) is None:
            return Heartbeat(time.time(), host=host)
        statuses = ranks.statuses()
        world = ranks.world if self.observes else 0
        return Heartbeat(time.time(), ranks.attempt if statuses else None, statuses, host, world, self.signalled)

    def add_host_metrics(self, host: Mapping[str, float]) -> None:
        """Have a sample of the host's metrics written to the event store."""
        if self._collector is not None:
            self._collector.collector.add_host_metrics(host)

    async def close(self) -> None:
        """Kill the ranks that were started here, write what they have left, and remove it."""
        self._end_standby()
        if self.present is not None:
            await self.present.stop(0)
            await self._end_collector()
            self.present.close()
        self._store.close()
        if self._in_use is not None:
            self._in_use.close()
            self.copies = self.copies or ("" if any(self._held.glob("rank-*")) else str(self._held))
        if self.copies:
            from megascale.operate.node.stored_copies import remove_copies

            with contextlib.suppress(TimeoutError, RuntimeError):
                await call_in_thread(lambda: remove_copies(Path(self.copies)), COPIES_S)

    def _begin_collector(self, ranks: Ranks) -> None:
        from megascale.operate.store.collector import Collector, CollectorThread

        self._collector = CollectorThread(Collector(ranks.paths, self._say), self._say)
        self._exporter.collector = self._collector.collector

    async def _end_collector(self, *, wait: bool = True) -> None:
        """Have the collector read what the ranks have left, and with `wait` write it."""
        if (collector := self._collector) is None:
            return
        self._collector = None
        with contextlib.suppress(TimeoutError, RuntimeError):
            await call_in_thread(collector.finish if wait else collector.drain, COLLECTOR_S)

    def _report_end(self, end: RankEnd) -> None:
        if self.present is not None:
            self._send(RanksEnded(self.present.attempt, (end,)))
            self._changed()

    def _report_ends(self, stuck: Sequence[int] = ()) -> None:
        if self.present is not None:
            self._send(RanksEnded(self.present.attempt, tuple(self.present.ends.values()), tuple(stuck)))
