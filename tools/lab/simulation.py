"""A job in simulated time: the driver's state machine (`driver.job`), and nodes that answer its commands.

The nodes are as simple as can be: agents join, open the store, start ranks, train steps of equal length, and end ranks
by order. Faults are put in from outside, by `fail_rank`, `lose_node` and `hang`. Months pass in seconds, because only
events cost time.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megascale.config.fault import FaultConfig
from megascale.operate.channel.messages import (
    AgentMessage,
    Collect,
    Heartbeat,
    Hello,
    OpenStore,
    RankEnd,
    RanksEnded,
    Records,
    Start,
    Stop,
    StoreOpened,
)
from megascale.operate.diagnose.hang.hang import Verdict
from megascale.operate.driver.commands import Command, Exclude, Finish, Request, Say, Send, StartAgent
from megascale.operate.driver.incidents import JobHistory
from megascale.operate.driver.job import Job
from megascale.operate.driver.job_state import JobPlan
from megascale.record.rank_state import RankState, RankStatus

TICK_S = 0.5
"""Seconds between looks of the driver at deadlines, while a fault is dealt with."""


@dataclass(frozen=True)
class Timing:
    """Seconds: of a step, from the start of ranks to their first step, of an agent's start, of a node's arrival on
    request, of a message, and of the end of ranks by order; `refill_s`: until a new spare follows an excluded node.
    """

    step_s: float = 10.0
    start_s: float = 60.0
    agent_s: float = 5.0
    request_s: float = 300.0
    message_s: float = 0.01
    end_s: float = 1.0
    refill_s: float | None = None


@dataclass
class _Node:
    """A simulated node: the attempt that it runs and its ranks; False for `alive` once it is lost or released."""

    name: str
    alive: bool = True
    attempt: int | None = None
    ranks: tuple[int, ...] = ()
    ended: set[int] = field(default_factory=set)


class Simulation:
    """A job of `plan` on simulated nodes.

    `now`: simulated time, from 0; `steps`: completed steps of the job, counted once; `verdict`: of the next hang;
    `said`: lines for people; `excluded`: the times at which others have replaced nodes, by node; `broken`: why agents
    that are started again end before they join, by node.
    """

    def __init__(
        self, plan: JobPlan, settings: FaultConfig, spares: int, timing: Timing = Timing(), more_nodes: int = 0
    ) -> None:
        self.now = 0.0
        self.timing = timing
        self.steps = 0
        self.status: int | None = None
        self.verdict: Verdict = Verdict("collective")
        self.said: list[tuple[float, str]] = []
        self.excluded: dict[str, float] = {}
        self.broken: dict[str, str] = {}
        self.nodes: dict[str, _Node] = {}
        self.on_start: Callable[[], None] = lambda: None
        self.lose_steps = 0
        self._more_nodes = more_nodes
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._node_numbers = itertools.count()
        self._epoch = 0
        self._ticking = -1
        self._running_since: float | None = None
        self._hung = False
        self.job = Job(plan, settings, JobHistory(), self.now)
        self.job.hang_verdict = self._hang_verdict
        self._expect(plan.nodes + spares)

    # time

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def run(self, until: float) -> None:
        """Advance to a time, or to the end of the job."""
        while self.status is None and self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = max(self.now, until) if self.status is None else self.now
        self._count_steps()

    @property
    def trains(self) -> bool:
        """True while steps are computed."""
        return self._running_since is not None and not self._hung

    # faults

    def fail_rank(self, rank: int) -> None:
        """Kill a rank."""
        self.end_ranks([RankEnd(rank, -9, self.now)])

    def end_ranks(self, ends: Sequence[RankEnd]) -> None:
        """End ranks out of order."""
        for end in ends:
            node = self._node_of(end.rank)
            if node is not None and node.attempt is not None and end.rank not in node.ended:
                self._pause()
                node.ended.add(end.rank)
                self._send(node.name, RanksEnded(node.attempt, (end,)))

    def lose_node(self, name: str) -> None:
        """Lose a node: its agent ends with all its ranks."""
        node = self.nodes.get(name)
        if node is None or not node.alive:
            return
        self._pause()
        node.alive, node.attempt = False, None
        self._perform(self.job.agent_ended(name, "its agent ended", self.now))

    def hang(self, verdict: Verdict, notice_s: float) -> None:
        """Let all ranks stop making progress; `notice_s`: until heartbeats have shown it for long enough."""
        if not self.trains:
            return
        self._count_steps()
        self._hung, self.verdict, epoch = True, verdict, self._epoch
        since = self.now
        self.at(self.now + notice_s, lambda: self._beat_all(epoch, since) if epoch == self._epoch else None)

    # the cluster

    def _perform(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    self._tell(command)
                case Say():
                    self.said.append((self.now, command.text))
                case StartAgent():
                    after_s = command.after_s + self.timing.agent_s
                    self.at(self.now + after_s, functools.partial(self._start_agent, command.node))
                case Exclude():
                    self.nodes[command.node].alive = False
                    self.excluded[command.node] = self.now
                    if self.timing.refill_s is not None:
                        self.at(self.now + self.timing.refill_s, functools.partial(self._expect, 1))
                case Request():
                    count = min(command.count, self._more_nodes)
                    self._more_nodes -= count
                    self.at(self.now + self.timing.request_s, functools.partial(self._expect, count))
                case Finish():
                    self._pause()
                    self.status = command.status

    def _expect(self, count: int) -> None:
        names = [f"node{next(self._node_numbers)}" for _ in range(count)]
        self.nodes |= {name: _Node(name) for name in names}
        self._perform(self.job.expect(names, self.now))
        for name in names:
            self.at(self.now + self.timing.agent_s, functools.partial(self._join, name))

    def _start_agent(self, name: str) -> None:
        """Let the agent of a node join, or end before."""
        reason = self.broken.get(name)
        self._join(name) if reason is None else self._perform(self.job.agent_ended(name, reason, self.now))

    def _join(self, name: str) -> None:
        node = self.nodes[name]
        node.alive, node.attempt = True, None
        self._perform(self.job.receive(name, Hello(name, name, name, 8), self.now))

    def _send(self, name: str, message: AgentMessage) -> None:
        self._perform(self.job.receive(name, message, self.now))

    def _later(self, name: str, message: AgentMessage, seconds: float) -> None:
        self.at(self.now + seconds, lambda: self._send(name, message) if self.nodes[name].alive else None)

    def _tell(self, command: Send) -> None:
        """Let a node answer a message."""
        node, message = self.nodes[command.node], command.message
        if not node.alive:
            return
        match message:
            case OpenStore():
                self._later(node.name, StoreOpened(message.attempt, f"{node.name}:1"), self.timing.message_s)
            case Start():
                node.attempt, node.ranks, node.ended = message.attempt, message.ranks, set()
                if 0 in message.ranks:
                    self._begin(message.attempt)
            case Stop():
                node.attempt, node.ended = None, set(node.ranks)
                self._pause()
                self._later(node.name, RanksEnded(message.attempt, ()), self.timing.end_s)
            case Collect():
                self._later(node.name, Records(message.attempt, {}, {}), self.timing.message_s)

    def _begin(self, attempt: int) -> None:
        """Rank 0 has started: the first step follows, then a second one that proves progress."""
        self._epoch += 1
        epoch, self._hung = self._epoch, False
        self.steps -= min(self.lose_steps, self.steps)
        self.at(self.now + self.timing.start_s, lambda: self._train(epoch, attempt))

    def _train(self, epoch: int, attempt: int) -> None:
        if epoch != self._epoch or self.job.attempt is None or self.job.attempt.failed:
            return
        self._running_since = self.now
        self._beat(attempt, self.steps + 1, 0.0)
        self.at(self.now + self.timing.step_s, lambda: self._beat(attempt, 0, 0.0) if epoch == self._epoch else None)
        self.on_start()

    def _beat(self, attempt: int, step: int, idle_s: float) -> None:
        self._count_steps()
        step_s = self.timing.step_s
        status = RankStatus(0, 1, "step", step or self.steps + 1, 1, idle_s, 0.0, step_s)
        if node := self._node_of(0):
            self._send(node.name, Heartbeat(self.now, attempt, (status,)))

    def _beat_all(self, epoch: int, since: float) -> None:
        """Show the driver that no rank makes progress."""
        self._running_since = None
        for node in [node for node in self.nodes.values() if node.alive]:
            statuses = tuple(
                RankStatus(rank, 1, "step", self.steps + 1, 1, self.now - since, 0.0, self.timing.step_s)
                for rank in (node.ranks if node.attempt is not None else ())
            )
            self._send(node.name, Heartbeat(self.now, node.attempt, statuses))
        self._begin_ticks()

    def _tick(self, epoch: int) -> None:
        """Let time pass for the driver until the fault is dealt with."""
        if epoch == self._epoch and self.status is None:
            for name, member in self.job.roster.members.items():
                member.heard = self.now if self.nodes[name].alive else member.heard  # its heartbeats
            self._perform(self.job.tick(self.now))
            self.at(self.now + TICK_S, functools.partial(self._tick, epoch))

    def _pause(self) -> None:
        """Training stops: the steps so far count, and the driver is told the time until it goes on."""
        if self._running_since is not None:
            self._beat(self.job.history.attempt, 0, 0.0)
        self._running_since = None
        self._begin_ticks()

    def _begin_ticks(self) -> None:
        """Let time pass for the driver, in one chain of events."""
        if self._ticking != self._epoch:
            self._ticking = self._epoch
            self.at(self.now + TICK_S, functools.partial(self._tick, self._epoch))

    def _count_steps(self) -> None:
        if self._running_since is not None and not self._hung:
            done = int((self.now - self._running_since) / self.timing.step_s)
            self.steps += done
            self._running_since += done * self.timing.step_s

    def _node_of(self, rank: int) -> _Node | None:
        attempt = self.job.attempt
        name = attempt.node_of.get(rank) if attempt is not None else None
        return self.nodes.get(name) if name else None

    def _hang_verdict(self, records: Mapping[int, RankState], states: Mapping[int, str]) -> Verdict:
        return self.verdict
