"""The way from waiting ranks to the culprit of a hang: through groups and messages, a rank for a rank.

- `routes_to`: for each rank that waits for the culprits, directly or through others, the next rank on the way
- `longest_chain`: the ranks of the longest way; `describe_chain`: in words
- `group_waits`: the groups in which ranks wait: who waits, and who has not come
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megascale.core.flight_record import FlightEvent
from megascale.core.rank import format_ranks
from megascale.observe.wait_words import describe_action, describe_operation
from megascale.observe.waits import WaitGraph, WaitPlace, other_side

MOST_GROUPS = 12
"""Most groups in a list."""

MOST_COUNTS = 4
"""Most missing ranks whose counts are given."""


@dataclass(frozen=True)
class GroupWait:
    """Ranks that wait in an operation of a group. `missing`: its ranks that have not come, or not gone on."""

    group: str
    operation: str
    sequence: int
    members: tuple[int, ...]
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    entered: Mapping[int, int]

    def __str__(self) -> str:
        verb = "wait" if len(self.waiting) > 1 else "waits"
        text = f"{self.operation} of {format_ranks(self.members)}: {format_ranks(self.waiting)} {verb}"
        if not self.missing:
            return f"{text}, all have come, the data are missing"
        counts = [f"rank {rank} has entered {self.entered.get(rank, 0)}" for rank in self.missing[:MOST_COUNTS]]
        have = "have" if len(self.missing) > 1 else "has"
        return f"{text}, {format_ranks(self.missing)} {have} not come ({', '.join(counts)})"


def routes_to(culprits: Iterable[int], graph: WaitGraph) -> dict[int, int]:
    """Return the next rank on the shortest way of waits to a culprit, by rank, the nearest ranks first."""
    awaited: dict[int, list[WaitPlace]] = {}
    for place, missing in graph.missing.items():
        for rank in missing:
            awaited.setdefault(rank, []).append(place)
    goals = set(culprits)
    routes: dict[int, int] = {}
    seen: set[WaitPlace] = set()
    queue = deque(sorted(goals))
    while queue:
        target = queue.popleft()
        for place in awaited.get(target, ()):
            if place not in seen:
                seen.add(place)
                new = [rank for rank in graph.waiting[place] if rank not in routes and rank not in goals]
                routes |= dict.fromkeys(new, target)
                queue += new
    for waits in (graph.on_phase, graph.on_device):  # for ranks that may wait for many others
        for rank, targets in waits.items():
            target = next((other for other in targets if other in goals or other in routes), None)
            if target is not None and rank not in routes and rank not in goals:
                routes[rank] = target
    return routes


def longest_chain(routes: Mapping[int, int]) -> list[int]:
    """Return the ranks of the longest way, the culprit last; empty if no rank waits."""
    depth: dict[int, int] = {}
    for rank, target in routes.items():  # a target comes before the ranks that wait for it
        depth[rank] = depth.get(target, 0) + 1
    if not depth:
        return []
    chain = [min(depth, key=lambda rank: (-depth[rank], rank))]
    while chain[-1] in routes:
        chain.append(routes[chain[-1]])
    return chain


def describe_chain(chain: Sequence[int], graph: WaitGraph, names: Mapping[int, str]) -> list[str]:
    """Return a line for each rank of a chain. `names`: how ranks are called, such as 'rank 3 (tp 1, dp 0, pp 1)'."""
    lines = []
    for rank, target in zip(chain, [*chain[1:], None], strict=True):
        where = describe_wait(rank, graph)
        lines.append(f"{names[rank]} {where}{f', for rank {target}' if target is not None else ''}")
    return lines


def describe_wait(rank: int, graph: WaitGraph) -> str:
    """Describe where a rank is: 'waits in receive 17 of group pp.up receive 2, in F of micro-batch 3 on chunk 0'."""
    record = graph.records.get(rank)
    if record is None:
        return "has no flight record"
    action = describe_action(last_action(record.last))
    if rank in graph.places:
        verb = "is stuck before the issue of" if rank in graph.stuck else "waits in"
        return f"{verb} {describe_operation(graph.places[rank], graph)}{action}"
    if rank in graph.on_device:
        return f"waits for its device{action}"
    if rank in graph.on_phase:
        return f"waits in phase {record.phase}"
    return f"is in phase {record.phase}, in no collective{action}"


def last_action(events: Sequence[FlightEvent]) -> FlightEvent | None:
    """Return the newest action of compute."""
    return next((event for event in reversed(events) if event.kind == "action"), None)


def group_waits(graph: WaitGraph, first: Iterable[int] = ()) -> list[GroupWait]:
    """Return the groups in which ranks wait, those that miss one of the ranks `first` before the others."""
    wanted = set(first)

    def order(place: WaitPlace) -> tuple[bool, bool, int, str]:
        missing = graph.missing[place]
        return wanted.isdisjoint(missing), not missing, len(place.members), place.key

    return [_group_wait(place, graph) for place in sorted(graph.waiting, key=order)[:MOST_GROUPS]]


def _group_wait(place: WaitPlace, graph: WaitGraph) -> GroupWait:
    missing = graph.missing[place]
    waiting, key = graph.waiting[place][0], place.key
    if place.is_message:
        key = other_side(graph.records[waiting].groups[key], waiting)
    entered = {}
    for rank in missing[:MOST_COUNTS]:
        record = graph.records.get(rank)
        state = record.groups.get(key) if record is not None else None
        entered[rank] = state.entered if state is not None else 0
    return GroupWait(
        place.key, describe_operation(place, graph), place.sequence, tuple(place.members),
        tuple(sorted(graph.waiting[place])), missing, entered,
    )  # fmt: skip
