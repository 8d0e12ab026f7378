"""One attempt of a job: where its ranks run, how they end, and what is known about a fault until its verdict."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from megascale.core.errors import Exit
from megascale.core.rank import format_ranks
from megascale.operate.channel.messages import RankEnd
from megascale.operate.driver.classify import (
    IS_STOPPED,
    Finding,
    add_culprits,
    classify_ends,
    classify_hang,
    classify_lost_nodes,
    is_cascade,
    is_killed,
    words_of,
)
from megascale.operate.driver.roster import Roster, node_by_rank
from megascale.operate.driver.watch import STOPPED_STATES, ProgressWatch
from megascale.record.rank_state import LogError, RankState, RankStatus

if TYPE_CHECKING:
    from megascale.operate.diagnose.hang.hang import Verdict


@dataclass(frozen=True)
class LostNode:
    """A node whose agent is gone or silent. `since`: its last message."""

    node: str
    reason: str
    since: float


@dataclass
class Attempt:
    """State of an attempt.

    `placement`: ranks by node; `busy`: nodes with ranks that have not ended. `ends`: of its ranks, by rank, of which
    `failures` are out of order, `causes` of them on their own account; `lost`: lost nodes, by node. `noted`: its first
    new step is in the log. `answered`: nodes that have answered Collect, with `records`, `states` and `stacks` by rank;
    `compared`: longer records have been asked for. `processes`: of ranks that another launcher runs, the process id by
    rank.

    12,288 ranks end in as many messages, so what each message asks for costs no look at all of them.
    """

    number: int
    placement: Mapping[str, tuple[int, ...]]
    watch: ProgressWatch
    busy: set[str] = field(default_factory=set)
    noted: bool = False
    ends: dict[int, RankEnd] = field(default_factory=dict)
    failures: set[int] = field(default_factory=set)
    causes: set[int] = field(default_factory=set)
    lost: dict[str, LostNode] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    compared: bool = False
    records: dict[int, RankState] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    processes: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.busy = set(self.placement)

    @cached_property
    def world(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.placement.values()))

    @cached_property
    def node_of(self) -> dict[int, str]:
        """The node of each rank."""
        return node_by_rank(self.placement)

    @property
    def failed(self) -> bool:
        """True once a rank has ended out of order, or a node is lost."""
        return bool(self.lost or self.failures)

    @property
    def has_left_in_order(self) -> bool:
        """True once every rank has left the job in order."""
        return len(self.ends) == self.world and not self.failures

    @property
    def status(self) -> int:
        """The exit status of a job all of whose ranks have left in order, and whose statuses are therefore known."""
        return max(end.status for end in self.ends.values() if end.status is not None)

    def why_unsaved(self, late: str, *, at_once: bool) -> str:
        """Return why a job that was asked to stop may not have saved. `late`: the limit that has passed, "" for none;
        `at_once`: it was asked twice.
        """
        if not self.watch.has_new_step:
            return "stopped before the first step"
        if at_once:
            return "stopped at once, without saving"
        if late:
            return f"stopped: the ranks had not saved{late}"
        errors = [end.error for end in self.ends.values() if end.error and not end.peer_lost]
        why = f": {errors[0]}" if errors else ""
        return f"stopped: {format_ranks(sorted(self.failures))} failed before all had saved{why}"

    @property
    def status_of_stop(self) -> int:
        """The status of a job that was asked to stop: an error of its own, such as a failed save, goes first."""
        ends, stops = self.ends.values(), (Exit.STOPPED, Exit.INTERRUPTED)
        errors = [end.exit_status for end in ends if end.error and not end.peer_lost and end.exit_status not in stops]
        if errors:
            return max(status or Exit.UNCLASSIFIED for status in errors)
        return Exit.OK if ends and all(end.in_order and end.status == 0 for end in ends) else Exit.STOPPED

    def is_free(self, node: str) -> bool:
        """Return True if no rank of this attempt runs on a node any more, or the node is lost."""
        return node not in self.busy

    def add_ends(self, node: str, ends: Sequence[RankEnd]) -> None:
        """Take ends of a node's ranks, any number of times; an observer may tell ends of the next attempt's ranks."""
        ranks = self.placement.get(node, ())
        for end in ends:
            if end.rank not in ranks:
                continue
            self.ends[end.rank] = end
            self.watch.step = max(self.watch.step, end.step)
            failed = not end.in_order
            for group, among in ((self.failures, failed), (self.causes, failed and not is_cascade(end))):
                (group.add if among else group.discard)(end.rank)
        if all(rank in self.ends for rank in ranks):
            self.busy.discard(node)

    def lose(self, lost: LostNode) -> None:
        """Take a node for lost."""
        self.lost[lost.node] = lost
        self.busy.discard(lost.node)

    def regain(self, node: str) -> None:
        """Take back a lost node: its ranks have run on."""
        del self.lost[node]
        self.busy |= {node} if any(rank not in self.ends for rank in self.placement[node]) else set()

    def statuses(self, roster: Roster) -> list[RankStatus]:
        """Return the last statuses of the ranks that run."""
        members = [roster.members[node] for node in self.placement if node in roster.members]
        return [s for member in members for s in member.statuses.values() if s.rank not in self.ends]

    def add_records(self, node: str, records: Mapping[int, dict], states: Mapping[int, str]) -> None:
        """Take a node's answer to Collect. An unreadable record counts as absent."""
        self.answered.add(node)
        self.states.update(states)
        for rank, values in records.items():
            with contextlib.suppress(LogError):
                self.records[rank] = RankState.from_dict(values)

    def forget_answers(self) -> None:
        """Drop the answers to an earlier Collect."""
        self.compared = False
        for answers in (self.answered, self.records, self.states, self.stacks):
            answers.clear()

    def finding(self, roster: Roster) -> Finding:
        """Return what the ends of ranks and the loss of nodes say. A cause that is older than the loss comes first;
        ranks that were killed or stopped beside it have not failed as a consequence.
        """
        causes = [self.ends[rank].time for rank in self.causes]
        lost = sorted(self.lost.values(), key=lambda lost: lost.since)
        if lost and not (causes and min(causes) < lost[0].since):
            ranks = [rank for node in self.lost for rank in self.placement.get(node, ())]
            reasons = {one.node: one.reason for one in lost}
            found = classify_lost_nodes(reasons, lost[0].since, ranks, self.failures.difference(ranks))
        else:
            found = classify_ends(self.ends, self.node_of)
        beside = {rank: f"was lost: {one.reason}" for one in lost for rank in self.placement.get(one.node, ())}
        beside |= {each.rank: IS_STOPPED for each in self.statuses(roster) if each.state in STOPPED_STATES}
        beside |= {rank: words_of(self.ends[rank]) for rank in self.causes if is_killed(self.ends[rank])}
        return add_culprits(found, beside, self.node_of)

    def hang_finding(self, verdict: Verdict) -> Finding:
        """Return the finding about a hang of this attempt."""
        doubted: tuple[int, ...] = ()
        if not verdict.ranks:
            groups = (record.groups.get(verdict.group) for record in self.records.values())
            doubted = next((tuple(group.ranks) for group in groups if group is not None and group.ranks), ())
        return classify_hang(verdict, self.watch.moved, self.node_of, tuple(self.records), self.stacks, doubted)


def find_hang(records: Mapping[int, RankState], states: Mapping[int, str]) -> Verdict:
    """As `hang_verdict`, which few jobs ask for: its module is loaded here."""
    from megascale.operate.diagnose.hang.hang import hang_verdict

    return hang_verdict(records, states)
