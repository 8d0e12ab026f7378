"""The state of a job (`driver.job`) and its primitive changes, on which stages and decisions act."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from megascale.config.fault import FaultConfig
from megascale.core.errors import Exit
from megascale.operate.channel.messages import Leave
from megascale.operate.driver.attempt import Attempt, LostNode, find_hang
from megascale.operate.driver.classify import Finding
from megascale.operate.driver.commands import Command, Exclude, Log, Request, Say, Send, StartAgent
from megascale.operate.driver.incidents import Incident, JobHistory
from megascale.operate.driver.node_order import NodeOrder
from megascale.operate.driver.roster import Roster, format_nodes, place_ranks
from megascale.operate.driver.watch import ProgressWatch

if TYPE_CHECKING:
    from megascale.operate.diagnose.hang.flight import Suspect
    from megascale.operate.diagnose.hang.hang import Verdict

SETTLE_S = 0.5  # seconds after a failure in which an earlier failure may become known

REJOIN_S = 8.0
"""Seconds that a new driver waits for the agents of a running attempt, but for those that are known to have ended."""


class Stage(StrEnum):
    """The present occupation of a job."""

    TAKEOVER = "takeover"
    GATHER = "gather"
    OPEN = "open"
    RUN = "run"
    SETTLE = "settle"
    COLLECT = "collect"
    STOP = "stop"
    OBSERVE = "observe"
    DONE = "done"


@dataclass(frozen=True)
class SmallerLayout:
    """The layout of the next attempt of a job that goes on with fewer nodes. `nodes`: with ranks; `overrides`: further
    `key=value` arguments.
    """

    nodes: int
    world_size: int
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class JobPlan:
    """The ranks of a job. `run`: its name; `arguments`: of its ranks; `resuming`: further ones once this launch has
    trained; `logs`: folder of the ranks' logs; `takeover`: an earlier driver of this launch may have left an attempt
    running; `requestable`, `revivable`: see `SparePool`; `checks`: nodes are checked before they join, and after a
    fault; `order`: in which ranks fill nodes; `observed`: another launcher runs the ranks; `alone`: of a job on one
    host that its first fault ends (`driver.alone`), with its ranks' logs in `logs` itself.
    `overrides`: further arguments of a layout that has shrunk; `smaller`: the layout for a number of nodes.
    `folder`: of the run; `metrics_address`, `metrics_port`: where agents serve metrics, as in `[observe]`.
    `find_suspect`: returns the rank that torch's flight recorder shows as missing; None without any.
    `stops`: signals at which the driver's process is asked to stop the job. `sites_hang_s`: as in `RunConfig`.
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
    order: NodeOrder = field(default_factory=NodeOrder)
    observed: bool = False
    alone: bool = False
    resuming: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    smaller: Callable[[int], SmallerLayout | None] = lambda nodes: None
    folder: str = ""
    metrics_address: str = ""
    metrics_port: int = 0
    find_suspect: Callable[[], Suspect | None] = lambda: None
    stops: tuple[int, ...] = ()
    sites_hang_s: float = math.inf

    def resumed(self, history: JobHistory) -> JobPlan:
        """Return the plan with the layout of an earlier driver of this launch."""
        if not history.overrides:
            return self
        return replace(self, nodes=len(history.nodes), world=history.world, overrides=history.overrides)


class JobState:
    """The state of a job.

    `places`: the nodes that ranks fill, in order, None where a node is wanted; `arranged`: the nodes at the start in
    the plan's order; `pending`: the incident whose action follows the end of the attempt; `saves`: its ranks save
    before. `told_by_agents`: they have told of the request to stop, which the supervisor may pass on, too.
    `stop_status`: of a job that stops without a step. `fault`: that ends a job on one host. `begun`: start of this
    driver; `deadline`: of the stage; `next_look`: time of the next look for a hang; `heartbeats`: a count of all.
    `unfit`: why nodes leave once their ranks have ended. `failed_checks`: why nodes have left. `first_steps`: by node,
    seconds of its longest first step of an attempt. `incomplete_at`: when to say that ranks of another launcher are not
    found, None while none is missing.
    """

    def __init__(self, plan: JobPlan, settings: FaultConfig, history: JobHistory, now: float) -> None:
        self.plan = plan.resumed(history)
        self.settings = settings
        self.history = history
        self.hang_verdict = find_hang
        self.roster = Roster(node for node, until in history.excluded.items() if until > now)
        self.places: list[str | None] = [None] * self.plan.nodes
        self.arranged: list[str] = []
        self.attempt: Attempt | None = None
        self.stage = Stage.GATHER
        self.begun = now
        self.deadline = now + settings.replacement_wait_s
        self.pending: Incident | None = None
        self.verdict: Verdict | None = None
        self.waiting_since: float | None = None
        self.stop_requests = 0
        self.stop_status: int = Exit.STOPPED
        self.told_by_agents = False
        self.fault: Finding | None = None
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
        elif plan.takeover and history.nodes:  # its attempt may still run, or its last decision wait to be carried out
            self.places = [*history.nodes]
            placement = place_ranks(history.nodes, self.plan.world)
            self.attempt = Attempt(history.attempt, placement, self.new_watch(now))
            self.pending = history.undone
            self.enter(Stage.TAKEOVER, now + REJOIN_S)

    @property
    def present_attempt(self) -> Attempt:
        """The attempt, in every stage after `gather`."""
        assert self.attempt is not None
        return self.attempt

    @property
    def used(self) -> list[str]:
        """The nodes that have a place."""
        return [node for node in self.places if node]

    def new_watch(self, now: float, first_step_s: float = math.inf) -> ProgressWatch:
        return ProgressWatch(self.settings, now, first_step_s, self.plan.sites_hang_s)

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

    def begin_attempt(self, nodes: Sequence[str], placement: Mapping[str, tuple[int, ...]], now: float) -> Attempt:
        """Log and begin an attempt."""
        number, layout = self.history.attempt + 1, {"world": self.plan.world, "overrides": list(self.plan.overrides)}
        self.log({"event": "attempt", "time": now, "attempt": number, "nodes": list(nodes), **layout})
        self.attempt = Attempt(number, placement, self.new_watch(now))
        spares = self.roster.spares(nodes)
        more = f"; spare: {format_nodes(spares)}" if spares else ""
        self.do(Say(f"attempt {number}: {self.plan.world} ranks on {format_nodes(nodes)}{more}"))
        return self.attempt

    def lose(self, node: str, reason: str, now: float, since: float | None = None) -> None:
        """Take a node for lost, with the ranks on it. `since`: time of the loss, by default of the last message."""
        member = self.roster.members.get(node)
        self.roster.lose(node)
        if self.runs_ranks(node):
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

    def exclude(self, node: str, reason: str, now: float) -> None:
        """Take a node out of the job."""
        until = now + self.settings.node_exclusion_s
        if node in self.roster.members:
            self.do(Send(node, Leave(f"node {node} is replaced: {reason}")))
        self.roster.exclude(node)
        self.places = [None if place == node else place for place in self.places]
        self.log({"event": "excluded", "time": now, "node": node, "reason": reason, "until": until})
        self.do(Exclude(node, reason, until))

    def give_back(self, nodes: Sequence[str]) -> None:
        """Give excluded nodes back to the scheduler, for others."""
        self.do(*(Exclude(node, "it was replaced before", self.history.excluded[node]) for node in nodes))
        self.do(Say(f"replaced before, within fault.node_exclusion_s, and given back: {format_nodes(nodes)}"))
        self.do(*([Request(len(nodes))] if self.plan.requestable else []))

    def leave_out(self, node: str, reason: str, now: float) -> None:
        """Take out a node that failed its checks."""
        self.do(Say(f"node {node} failed its checks: {reason}"))
        self.failed_checks[node] = reason
        if node not in self.roster.members:
            self.do(Send(node, Leave(f"it failed its checks: {reason}")))
        self.exclude(node, f"it failed its checks: {reason}", now)

    def shrink(self, lost: Sequence[str]) -> None:
        """Go on without nodes, in a smaller layout."""
        kept = [node for node in self.places if node and node not in lost]
        layout = self.plan.smaller(len(kept))
        if layout is None:  # further nodes have left since `decide` has asked
            self.places = [node if node in kept else None for node in self.places]
            return
        self.plan = replace(self.plan, nodes=layout.nodes, world=layout.world_size, overrides=layout.overrides)
        self.places = [*kept[: layout.nodes]]

    def runs_ranks(self, node: str) -> bool:
        """Return True if ranks of the attempt should run on a node."""
        attempt = self.attempt
        started = self.stage not in (Stage.GATHER, Stage.DONE)
        return started and attempt is not None and node in attempt.placement and not attempt.is_free(node)
