"""The state machine of a job that survives faults: messages and times in, commands out.

    gather -> open -> run -> (settle | collect) -> stop -> gather -> ...
    takeover -> run                                                      a new driver; agents went on training
    observe -> run -> (settle | collect) -> observe -> ...               ranks of another launcher

- gather: wait until every place of the job has an idle node; open: rank 0's node opens the job's store
- run: ranks train; settle: a rank ended or a node is lost, the first cause may be still on its way
- collect: no rank makes progress, flight records and stacks are on their way; stop: the attempt's ranks are ended
- observe: another launcher starts the ranks, and restarts them; incidents are reported, nothing is done about them

A job on one host that its first fault ends has stages of its own after `run` (`driver.alone`).

The machine has no clock and no connections, so the driver and a simulation of months run the same code. Whatever must
outlive the process is in the history, each event of which is logged before it is acted upon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megascale.core.errors import Exit
from megascale.operate.channel.messages import (
    AgentMessage,
    CheckDone,
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
from megascale.operate.driver import alone, attempt_stages, decisions, end_stages
from megascale.operate.driver.attempt import Attempt, LostNode
from megascale.operate.driver.commands import Command, Request, Say, Send
from megascale.operate.driver.job_state import JobState, Stage
from megascale.record.metrics import Alert, RebuiltStages

START_S = 5.0  # seconds after an order to start ranks in which a heartbeat without ranks may be older than the order

ACT: dict[Stage, Callable[[JobState, float], None]] = {
    Stage.TAKEOVER: attempt_stages.takeover,
    Stage.GATHER: attempt_stages.gather,
    Stage.OPEN: attempt_stages.open_store,
    Stage.RUN: attempt_stages.run,
    Stage.SETTLE: attempt_stages.settle,
    Stage.COLLECT: attempt_stages.collect,
    Stage.STOP: end_stages.stop,
    Stage.OBSERVE: attempt_stages.observe,
    Stage.DONE: lambda job, now: None,
}

ACT_ALONE = ACT | {Stage.SETTLE: alone.settle, Stage.COLLECT: alone.collect, Stage.STOP: alone.stop}


class Job(JobState):
    """A job. Every event returns the commands to carry out, in order; times are Unix seconds and never go back."""

    def expect(self, names: Sequence[str], now: float) -> list[Command]:
        """The scheduler holds these nodes for the job. Those that the log excludes are given back for others."""
        if excluded := [name for name in names if name in self.roster.excluded]:
            self.give_back(excluded)
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
        if not self.runs_ranks(node) and node not in self.roster.excluded.union(self.roster.members):
            self.roster.fail(node, f"before it joined, {reason}")
            self.do(Say(f"node {node} cannot be used: before it joined, {reason}"))
        self.lose(node, reason, now, since=now)
        return self._advance(now)

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        for node in self.roster.silent(now, self.settings.node_lost_s):
            self.lose(node, f"no heartbeat for {now - self.roster.members[node].heard:.1f} s", now)
        attempt_stages.prepare(self)
        return self._advance(now)

    def forgive(self, seconds: float) -> None:
        """The driver heard nobody for so long, through no fault of the nodes."""
        for member in self.roster.members.values():
            member.heard += seconds
        if self.attempt is not None:
            self.attempt.watch.moved += seconds

    def checked(self, node: str, reason: str, now: float) -> list[Command]:
        """The checks of a node are done; `reason`: why it runs no ranks of this job, "" for a good node."""
        if reason and self.stage == Stage.STOP and self.runs_ranks(node):
            self.unfit[node] = reason  # it leaves when its ranks have ended
            return self._advance(now)
        if node in self.roster.members:
            self.roster.members[node].held = False
        if reason and not self.runs_ranks(node):
            self.leave_out(node, reason, now)
            if self.plan.requestable:
                self.do(Request(1))
        return self._advance(now)

    def refused(self, now: float) -> list[Command]:
        """The scheduler has no further node."""
        self.plan = replace(self.plan, requestable=False)
        return self._advance(now)

    def alert(self, found: Alert | RebuiltStages, now: float) -> list[Command]:
        """The ranks have told of something that needs no action."""
        decisions.alert(self, found, now)
        return self._advance(now)

    def request_stop(self, now: float, status: int = Exit.STOPPED) -> list[Command]:
        """Stop the job: the first request lets the ranks finish their step and save, the second kills them. A signal to
        all processes is one request, which agents may have told of before the supervisor passes it on. `status`: of a
        job that has not trained.
        """
        if self.told_by_agents:
            self.told_by_agents = False
            return self._advance(now)
        self.stop_requests += 1
        self.stop_status = status
        end_stages.take_stop_request(self, now)
        return self._advance(now)

    def _join(self, hello: Hello, now: float) -> None:
        if hello.node in self.roster.excluded:
            self.do(Send(hello.node, Leave(f"node {hello.node} was replaced")))
            return
        plan, fault = self.plan, self.settings
        times = fault.heartbeat_s, fault.poll_s, fault.agent_grace_s, fault.stop_grace_s
        self.do(Send(hello.node, Welcome(*times, plan.run, plan.folder, plan.metrics_address, plan.metrics_port)))
        heard = self.roster.members[hello.node].heard if hello.node in self.roster.members else now
        self.roster.join(hello, now)
        if self.plan.observed:
            return
        current = self.attempt.number if self.attempt is not None else None
        if hello.attempt is not None and hello.attempt != current:
            self.do(Send(hello.node, Stop(hello.attempt, 0.0)))
        elif hello.ranks and self.attempt is not None:
            end_stages.stop_again(self, hello.node, now)
        if hello.attempt != current and self.stage not in (Stage.TAKEOVER, Stage.OPEN) and self.runs_ranks(hello.node):
            assert self.attempt is not None
            self.attempt.lose(LostNode(hello.node, "its agent was started once more", heard))

    def _take(self, node: str, message: AgentMessage, now: float) -> None:
        """Take a message of a joined node into the state."""
        attempt, member = self.attempt, self.roster.members[node]
        number = None if isinstance(message, Hello | CheckDone) else message.attempt  # observers count their own
        current = attempt is not None and (self.plan.observed or number == attempt.number)
        if isinstance(message, Heartbeat):
            self.heartbeats += 1
            if message.ranks or now - member.started > START_S:
                member.attempt = message.attempt if message.ranks else None
            member.statuses = {status.rank: status for status in message.ranks}
            member.ended = {rank: end for rank, end in member.ended.items() if rank not in member.statuses}
            member.world, member.signalled = message.world, message.signalled
            if message.signalled and not (self.plan.observed or self.stop_requests):
                self._take_signal(now)
        if attempt is not None and current:
            self._take_of_attempt(attempt, node, message, now)
        if isinstance(message, RanksEnded) and self.plan.observed:
            member.ended |= {end.rank: end for end in message.ends}
        if isinstance(message, RanksEnded) and not message.stuck:
            runs_none = not message.ends  # of an attempt that the agent does not know
            if attempt is None or not current or runs_none or attempt.is_free(node):
                member.attempt = None

    def _take_signal(self, now: float) -> None:
        """Take a stop signal to the agents of all nodes, spares too, for a request to stop."""
        if all(member.signalled for member in self.roster.members.values()):
            self.stop_requests, self.told_by_agents = 1, True
            end_stages.take_stop_request(self, now)

    def _take_of_attempt(self, attempt: Attempt, node: str, message: AgentMessage, now: float) -> None:
        match message:
            case Heartbeat():
                attempt.watch.beat(message.ranks, now)
            case RanksEnded():
                attempt.add_ends(node, message.ends)
                attempt.stuck |= {node} if message.stuck else set()
            case StoreOpened():
                attempt_stages.start_ranks(self, message.address, now)
            case Records():
                attempt.add_records(node, message.records, message.states)
            case Stacks():
                attempt.stacks.update(message.stacks)

    def _advance(self, now: float) -> list[Command]:
        """Let the stages act until nothing changes, and return the commands since the last event."""
        before, act = None, ACT_ALONE if self.plan.alone else ACT
        while before != (self.stage, self.deadline):
            before = (self.stage, self.deadline)
            act[self.stage](self, now)
        commands, self.commands = self.commands, []
        return commands
