"""The nodes of a job: joined, lost, excluded, in use by the present attempt, or idle as spares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megascale.operate.channel.messages import Hello, RankEnd
from megascale.record.rank_state import RankStatus

MOST_NAMED = 8  # most nodes that a message names

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
"""Seconds before the agent of a node is started again that ended before it joined: doubled from the first to the
longest.
"""


@dataclass
class Member:
    """A node whose agent has joined.

    `heard`: time of its last message; `started`: of the last order to start ranks. `attempt`: the attempt of its ranks,
    None for an idle node; `statuses`: of its ranks, by rank. `held`: its node is being checked, and starts no ranks.
    `standby`: processes that it was told to have in standby since its ranks were started. `world`: ranks of the job, as
    an observer sees it; `ended`: the ends of those that it saw, by rank. `signalled`: its agent has got a stop signal.
    """

    hello: Hello
    heard: float
    started: float = 0.0
    connected: bool = True
    attempt: int | None = None
    held: bool = False
    standby: int = 0
    world: int = 0
    signalled: bool = False
    statuses: dict[int, RankStatus] = field(default_factory=dict)
    ended: dict[int, RankEnd] = field(default_factory=dict)


class Roster:
    """Nodes by name. `order`: names in which ranks fill nodes, as the scheduler gives them; `failed`: why agents have
    ended before they joined, by node.
    """

    def __init__(self, excluded: Iterable[str] = ()) -> None:
        self.members: dict[str, Member] = {}
        self.order: list[str] = []
        self.excluded = set(excluded)
        self.failed: dict[str, str] = {}
        self._failures: Counter[str] = Counter()

    def expect(self, names: Sequence[str]) -> None:
        """Add nodes that the job holds; their agents may join."""
        self.order += [name for name in names if name not in self.order]

    def join(self, hello: Hello, now: float) -> Member:
        """Add or renew a node."""
        self.failed.pop(hello.node, None)
        del self._failures[hello.node]
        member = Member(hello, now, attempt=hello.attempt if hello.ranks else None)
        self.members[hello.node] = member
        self.expect([hello.node])
        return member

    def fail(self, node: str, reason: str) -> None:
        """Note that the agent of a node has ended before it joined."""
        self.failed[node] = reason
        self._failures[node] += 1

    def retry(self, node: str) -> float:
        """Expect another agent of a node; return the seconds before its start, more with each failure in a row."""
        self.failed.pop(node, None)
        failures = self._failures[node]
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1)) if failures else 0.0

    def lose(self, node: str) -> None:
        """Forget a node until its agent joins again."""
        self.members.pop(node, None)

    def exclude(self, node: str) -> None:
        """Forget a node for good."""
        self.lose(node)
        self.excluded.add(node)
        self.order = [name for name in self.order if name != node]

    def spares(self, used: Iterable[str]) -> list[str]:
        """Return idle connected nodes, in order."""
        taken = self.excluded.union(used)
        return [name for name in self.order if name not in taken and self.is_idle(name)]

    def is_idle(self, node: str) -> bool:
        """Return True for a connected node without ranks."""
        member = self.members.get(node)
        if member is None or member.held or member.hello.observer:
            return False
        return member.connected and member.attempt is None

    def silent(self, now: float, limit_s: float) -> list[str]:
        """Return nodes that have sent nothing for longer than a limit."""
        return [name for name, member in self.members.items() if now - member.heard > limit_s]


def format_nodes(names: Sequence[str]) -> str:
    """Return "a, b and 7 more"."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def place_ranks(nodes: Sequence[str], world: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each node, which fill the nodes in order. Raises: ValueError if they do not divide"""
    if not nodes or world % len(nodes):
        raise ValueError(f"{world} ranks on {len(nodes)} nodes")
    each = world // len(nodes)
    return {node: tuple(range(place * each, (place + 1) * each)) for place, node in enumerate(nodes)}


def node_by_rank(placement: Mapping[str, Sequence[int]]) -> dict[int, str]:
    """Return the node of each rank."""
    return {rank: node for node, ranks in placement.items() for rank in ranks}
