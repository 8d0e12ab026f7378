"""The state machine of a job that survives faults: messages and times in, commands out.

    gather -> open -> run -> (settle | collect) -> stop -> gather -> ...
    takeover -> run                                                      a new driver; agents went on training
    observe -> run -> (settle | collect) -> observe -> ...               ranks of another launcher

- gather: wait until every place of the job has an idle node; open: rank 0's node opens the job's store
- run: ranks train; settle: a rank ended or a node is lost, the first cause may be still on its way
- collect: no rank makes progress, flight records and stacks are on their way; stop: the attempt's ranks are ended
- observe: another launcher starts the ranks, and restarts them; incidents are reported, nothing is done about them

The machine has no clock and no connections, so the driver and a simulation of months run the same code. Whatever must
outlive the process is in the history, each event of which is logged before it is acted upon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megascale.config.fault import FaultConfig
from megascale.core.flight_record import FlightRecord
from megascale.operate.channel.messages import (
    AgentMessage,
    Heartbeat,
    Hello,
    Leave,
    RanksEnded,
    Records,
    Stacks,
    Stop,
    StoreOpened,
    Welcome,
)
from megascale.operate.diagnose.hang.hang import Verdict
from megascale.operate.driver import decisions, stages
from megascale.operate.driver.attempt import Attempt, LostNode
from megascale.operate.driver.commands import Command, Exclude, Log, Request, Say, Send, StartAgent
from megascale.operate.driver.incidents import Incident, JobHistory
from megascale.operate.driver.roster import Roster, format_nodes
from megascale.operate.driver.shrink import SmallerLayout
from megascale.operate.driver.stages import Stage

START_S = 5.0
"""Seconds after an order to start ranks in which a heartbeat without ranks may be older than the order."""


@dataclass(frozen=True)
class JobPlan:
    """The ranks of a job. `run`: its name; `arguments`: of its ranks; `resuming`: further ones once this launch has
    trained; `logs`: folder of the ranks' logs; `takeover`: an earlier driver of this launch may have left an attempt
    running; `requestable`, `revivable`: see `SparePool`; `checks`: nodes are checked before they join, and after a
    fault; `observed`: another launcher runs the ranks.
    `overrides`: further arguments of a layout that has shrunk; `smaller`: the layout for a number of nodes.
    `folder`: of the run; `metrics_address`, `metrics_port`: where agents serve metrics, as in `[observe]`.
    """

    run: str
    nodes: int
    world: int
    arguments: tuple[str, ...]
    logs: str
    takeover: bool = False
    requestable: bool = False
    revivable: bool = True
    checks: bool = False
    observed: bool = False
    resuming: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    smaller: Callable[[int], SmallerLayout | None] = lambda nodes: None
    folder: str = ""
    metrics_address: str = ""
    metrics_port: int = 0

    @property
    def layout(self) -> dict[str, Any]:
        """The layout in the log."""
        return {"world": self.world, "overrides": list(self.overrides)}

    def resumed(self, history: JobHistory) -> JobPlan:
        """Return the plan with the layout of an earlier driver of this launch."""
        if not history.overrides:
            return self
        return replace(self, nodes=len(history.nodes), world=history.world, overrides=history.overrides)


class Job:
    """A job. Every event returns the commands to carry out, in order; times are Unix seconds and never go back.

    `places`: the nodes that ranks fill, in order, None where a node is wanted; `pending`: the incident whose action
    follows the end of the attempt; `saves`: its ranks save before. `told_by_agents`: they have told of the request to
    stop, which the supervisor may pass on, too. `begun`: start of this driver; `deadline`: of the stage; `next_look`:
    time of the next look for a hang; `heartbeats`: a count of all. `unfit`: why nodes leave once their ranks have
    ended. `failed_checks`: why nodes have left. `first_steps`: by node, seconds of its longest first step of an
    attempt. `incomplete_at`: when to say that ranks of another launcher are not found, None while none is missing.
    """

    def __init__(
        self,
        plan: JobPlan,
        settings: FaultConfig,
        history: JobHistory,
        hang_verdict: Callable[[Mapping[int, FlightRecord], Mapping[int, str]], Verdict],
        now: float,
    ) -> None:
        self.plan = plan.resumed(history)
        self.settings = settings
        self.history = history
        self.hang_verdict = hang_verdict
        self.roster = Roster(node for node, until in history.excluded.items() if until > now)
        self.places: list[str | None] = [None] * self.plan.nodes
        self.attempt: Attempt | None = None
        self.stage = Stage.GATHER
        self.begun = now
        self.deadline = now + settings.replacement_wait_s
        self.pending: Incident | None = None
        self.verdict: Verdict | None = None
        self.waiting_since: float | None = None
        self.stop_requests = 0
        self.told_by_agents = False
        self.saves = False
        self.next_look = 0.0
        self.heartbeats = 0
        self.unfit: dict[str, str] = {}
        self.failed_checks: dict[str, str] = {}
        self.first_steps: dict[str, float] = {}
        self.incomplete_at: float | None = None
        self.commands: list[Command] = []
        if plan.observed:
            self.enter(Stage.OBSERVE, math.inf)
        elif plan.takeover:
            stages.begin_takeover(self, now)

    # events

    def expect(self, names: Sequence[str], now: float) -> list[Command]:
        """The scheduler holds these nodes for the job. Those that the log excludes are given back for others."""
        excluded = [name for name in names if name in self.roster.excluded]
        self.do(*(Exclude(node, "it was replaced before", self.history.excluded[node]) for node in excluded))
        if excluded:
            self.do(Say(f"replaced before, within fault.exclude_s, and given back: {format_nodes(excluded)}"))
        if excluded and self.plan.requestable:
            self.do(Request(len(excluded)))
        self.roster.expect([name for name in names if name not in excluded])
        return self._advance(now)

    def receive(self, node: str, message: AgentMessage, now: float) -> list[Command]:
        """An agent sent a message."""
        if isinstance(message, Hello):
            self._join(message, now)
        elif (member := self.roster.members.get(node)) is not None:
            member.heard, member.connected = now, True
            self._take(node, message, now)
        return self._advance(now)

    def disconnected(self, node: str, now: float) -> list[Command]:
        """The connection of an agent was lost; the agent may connect again."""
        if node in self.roster.members:
            self.roster.members[node].connected = False
        return self._advance(now)

    def agent_ended(self, node: str, reason: str, now: float) -> list[Command]:
        """The process of a node's agent has ended, and its ranks with it."""
        if self.attempt is not None and node in self.attempt.lost and self.stage != Stage.GATHER:
            return self._advance(now)  # known, and no other agent was started since
        if not self._runs_ranks(node) and node not in self.roster.excluded.union(self.roster.members):
            self.roster.fail(node, f"before it joined, {reason}")
            self.do(Say(f"node {node} cannot be used: before it joined, {reason}"))
        self.lose(node, reason, now, since=now)
        return self._advance(now)

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        for node in self.roster.silent(now, self.settings.node_lost_s):
            self.lose(node, f"no heartbeat for {now - self.roster.members[node].heard:.1f} s", now)
        stages.prepare(self)
        return self._advance(now)

    def forgive(self, seconds: float) -> None:
        """The driver heard nobody for so long, through no fault of the nodes."""
        for member in self.roster.members.values():
            member.heard += seconds
        if self.attempt is not None:
            self.attempt.watch.moved += seconds

    def hold(self, nodes: Sequence[str]) -> None:
        """These nodes start no ranks until their checks are done."""
        for node in nodes:
            self.roster.members[node].held = True

    def checked(self, node: str, reason: str, now: float) -> list[Command]:
        """The checks of a node are done; `reason`: why it runs no ranks of this job, "" for a good node."""
        if reason and self.stage == Stage.STOP and self._runs_ranks(node):
            self.unfit[node] = reason  # it leaves when its ranks have ended
            return self._advance(now)
        if node in self.roster.members:
            self.roster.members[node].held = False
        if reason and not self._runs_ranks(node):
            self.leave_out(node, reason, now)
            if self.plan.requestable:
                self.do(Request(1))
        return self._advance(now)

    def refused(self, now: float) -> list[Command]:
        """The scheduler has no further node."""
        self.plan = replace(self.plan, requestable=False)
        return self._advance(now)

    def alert(self, metric: str, value: float, recent: float, now: float) -> list[Command]:
        """A metric is far above its recent median."""
        decisions.alert(self, metric, value, recent, now)
        return self._advance(now)

    def request_stop(self, now: float) -> list[Command]:
        """Stop the job: the first request lets the ranks finish their step and save, the second kills them. A signal to
        all processes is one request, which agents may have told of before the supervisor passes it on.
        """
        if self.told_by_agents:
            self.told_by_agents = False
            return self._advance(now)
        self.stop_requests += 1
        stages.take_stop_request(self, now)
        return self._advance(now)

    # what stages use

    def do(self, *commands: Command) -> None:
        """Add commands."""
        self.commands += commands

    def log(self, event: Mapping[str, Any]) -> None:
        """Apply an event to the history, and log it."""
        self.history.apply(event)
        self.do(Log(event))

    def enter(self, stage: Stage, deadline: float) -> None:
        """Enter a stage."""
        self.stage, self.deadline = stage, deadline

    def lose(self, node: str, reason: str, now: float, since: float | None = None) -> None:
        """Take a node for lost, with the ranks on it. `since`: time of the loss, by default of the last message."""
        member = self.roster.members.get(node)
        self.roster.lose(node)
        if self._runs_ranks(node):
            assert self.attempt is not None
            heard = now if member is None else min(member.heard, now)
            self.attempt.lose(LostNode(node, reason, heard if since is None else since))
        elif member is not None and self.stage != Stage.DONE and not self.stop_requests:
            revived = self.plan.revivable and node not in self.roster.excluded
            self.do(Say(f"idle node {node} was lost: {reason}{'; its agent is started again' if revived else ''}"))
            if revived:
                self.start_agents([node])
            elif node in self.places and self.stage == Stage.GATHER:
                self.places = [None if place == node else place for place in self.places]
                self.do(*([Request(1)] if self.plan.requestable and not self.roster.spares(self.used) else []))

    def start_agents(self, nodes: Sequence[str]) -> float:
        """Order the agents of lost nodes; return the longest pause before a start."""
        pauses = {node: self.roster.retry(node) for node in nodes}
        self.do(*(StartAgent(node, after_s) for node, after_s in pauses.items()))
        late = [node for node, after_s in pauses.items() if after_s]
        longest = max(pauses.values(), default=0.0)
        if late:
            self.do(Say(f"the agent of {format_nodes(late)} is started again within {longest:g} s"))
        return longest

    @property
    def used(self) -> list[str]:
        """The nodes that have a place."""
        return [node for node in self.places if node]

    def leave_out(self, node: str, reason: str, now: float) -> None:
        """Take out a node that failed its checks."""
        self.do(Say(f"node {node} failed its checks: {reason}"))
        self.failed_checks[node] = reason
        if node not in self.roster.members:
            self.do(Send(node, Leave(f"it failed its checks: {reason}")))
        stages.exclude(self, node, f"it failed its checks: {reason}", now)

    def shrink(self, lost: Sequence[str]) -> None:
        """Go on without nodes, in a smaller layout."""
        kept = [node for node in self.places if node and node not in lost]
        layout = self.plan.smaller(len(kept))
        if layout is None:  # further nodes have left since `decide` has asked
            self.places = [node if node in kept else None for node in self.places]
            return
        self.plan = replace(self.plan, nodes=layout.nodes, world=layout.world_size, overrides=layout.overrides)
        self.places = [*kept[: layout.nodes]]

    def _runs_ranks(self, node: str) -> bool:
        """Return True if ranks of the attempt should run on a node."""
        attempt = self.attempt
        started = self.stage not in (Stage.GATHER, Stage.DONE)
        return started and attempt is not None and node in attempt.placement and not attempt.is_free(node)

    def _join(self, hello: Hello, now: float) -> None:
        if hello.node in self.roster.excluded:
            self.do(Send(hello.node, Leave(f"node {hello.node} was replaced")))
            return
        settings = self.settings
        times = settings.heartbeat_s, settings.poll_s, settings.agent_grace_s, settings.stop_grace_s
        plan = self.plan
        self.do(Send(hello.node, Welcome(*times, plan.run, plan.folder, plan.metrics_address, plan.metrics_port)))
        heard = self.roster.members[hello.node].heard if hello.node in self.roster.members else now
        self.roster.join(hello, now)
        if self.plan.observed:
            return
        current = self.attempt.number if self.attempt is not None else None
        if hello.attempt is not None and hello.attempt != current:
            self.do(Send(hello.node, Stop(hello.attempt, 0.0)))
        elif hello.ranks and self.attempt is not None:
            stages.stop_again(self, hello.node, now)
        if hello.attempt != current and self.stage not in (Stage.TAKEOVER, Stage.OPEN) and self._runs_ranks(hello.node):
            assert self.attempt is not None
            self.attempt.lose(LostNode(hello.node, "its agent was started once more", heard))

    def _take(self, node: str, message: AgentMessage, now: float) -> None:
        """Take a message of a joined node into the state."""
        attempt, member = self.attempt, self.roster.members[node]
        same = self.plan.observed or getattr(message, "attempt", None) == getattr(attempt, "number", -1)
        current = attempt is not None and same
        if isinstance(message, Heartbeat):
            self.heartbeats += 1
            if message.ranks or now - member.started > START_S:
                member.attempt = message.attempt if message.ranks else None
            member.statuses = {status.rank: status for status in message.ranks}
            member.world, member.signalled = message.world, message.signalled
            if message.signalled and not (self.plan.observed or self.stop_requests):
                self._take_signal(now)
        if attempt is not None and current:
            self._take_of_attempt(attempt, node, message, now)
        if isinstance(message, RanksEnded) and not message.stuck:
            runs_none = not message.ends  # of an attempt that the agent does not know
            if attempt is None or not current or runs_none or attempt.is_free(node):
                member.attempt = None

    def _take_signal(self, now: float) -> None:
        """Take a stop signal to the agents of all nodes, spares too, for a request to stop."""
        if all(member.signalled for member in self.roster.members.values()):
            self.stop_requests, self.told_by_agents = 1, True
            stages.take_stop_request(self, now)

    def _take_of_attempt(self, attempt: Attempt, node: str, message: AgentMessage, now: float) -> None:
        match message:
            case Heartbeat():
                attempt.watch.beat(message.ranks, now)
            case RanksEnded():
                attempt.add_ends(node, message.ends)
                attempt.stuck |= {node} if message.stuck else set()
            case StoreOpened():
                stages.start_ranks(self, message.address, now)
            case Records():
                attempt.add_records(node, message.records, message.states)
            case Stacks():
                attempt.stacks.update(message.stacks)

    def _advance(self, now: float) -> list[Command]:
        """Let the stages act until nothing changes, and return the commands since the last event."""
        before = None
        while before != (self.stage, self.deadline):
            before = (self.stage, self.deadline)
            stages.ACT[self.stage](self, now)
        commands, self.commands = self.commands, []
        return commands
