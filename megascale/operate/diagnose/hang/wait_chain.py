"""The chain of waits in a hang: sets of ranks that wait in the same place for the same ranks, and the way from any of
them to the culprit.

- `waiting_sets`: the wait graph as sets of ranks; `distances`: their links to the culprits
- `wait_chain`: from a waiting rank to a culprit, link by link
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megascale.core.rank import format_ranks
from megascale.operate.diagnose.hang.waits import WaitGraph, place_name


@dataclass(frozen=True, eq=False)
class WaitingSet:
    """Ranks that wait in the same place for the same ranks.

    `group`: its key in flight records, "" for a wait in no group; `members`: the group's ranks, or a message's two
    ends. `sequence`: -1 without a group. `awaited`: the ranks that have not come; empty if the data are missing.
    `mixed`: the members have come with different calls.
    """

    what: str
    group: str
    sequence: int
    members: Collection[int]
    ranks: tuple[int, ...]
    awaited: tuple[int, ...]
    mixed: bool = False

    def __str__(self) -> str:
        text = f"{format_ranks(self.ranks)} wait{'s' if len(self.ranks) == 1 else ''} {self.what}"
        if self.mixed:
            return f"{text}, where members have made different calls"
        if self.awaited:
            return f"{text} for {format_ranks(self.awaited)}"
        return f"{text}, which all have issued: the data are missing" if self.group else text


@dataclass(frozen=True)
class WaitLink:
    """A link of a chain: `rank` waits, as all ranks of `waiting`, for `awaited`."""

    rank: int
    waiting: WaitingSet
    awaited: int

    def __str__(self) -> str:
        others = len(self.waiting.ranks) - 1
        too = f" (with {others} other rank{'s' if others > 1 else ''})" if others else ""
        return f"rank {self.rank} waits {self.waiting.what}{too} for rank {self.awaited}"


def waiting_sets(graph: WaitGraph) -> list[WaitingSet]:
    """Return the waits of a graph, those of most ranks first. A rank that is stuck in a call's issue waits for none."""
    found = []
    for place, waiting in graph.waiting.items():
        if ranks := tuple(sorted(set(waiting) - graph.stuck)):
            mixed = place in graph.mixed  # where members have made different calls, each waits for the others
            awaited = tuple(sorted(place.members if mixed else graph.missing[place]))
            what = f"in {place_name(place, graph)}"
            found.append(WaitingSet(what, place.key, place.sequence, place.members, ranks, awaited, mixed))
    for waits, what in ((graph.on_phase, "in phase {}"), (graph.on_device, "for its device")):
        same: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for rank, awaited in waits.items():
            same[what.format(graph.records[rank].phase), id(awaited)].append(rank)  # shared: to hash all is quadratic
        found += [
            WaitingSet(name, "", -1, (), tuple(sorted(ranks)), waits[ranks[0]]) for (name, _), ranks in same.items()
        ]
    return sorted(found, key=lambda each: (-len(each.ranks), each.ranks))


def distances(sets: Sequence[WaitingSet], culprits: Collection[int]) -> dict[WaitingSet, int]:
    """Return the number of links from each set to a culprit: 1 for a set that waits for one. A set from which no chain
    leads to a culprit is left out.
    """
    awaiting: defaultdict[int, list[WaitingSet]] = defaultdict(list)
    for each in sets:
        for rank in each.awaited:
            awaiting[rank].append(each)
    found: dict[WaitingSet, int] = {}
    to_visit = deque((rank, 0) for rank in culprits)
    visited = set(culprits)
    while to_visit:
        rank, links = to_visit.popleft()
        for each in awaiting[rank]:
            if each not in found:
                found[each] = links + 1
                to_visit.extend((other, links + 1) for other in each.ranks if other not in visited)
                visited.update(each.ranks)
    return found


def wait_chain(sets: Sequence[WaitingSet], culprits: Collection[int]) -> list[WaitLink]:
    """Return the shortest chain to a culprit, from the rank farthest from all; empty if no rank waits for one."""
    far = distances(sets, culprits)
    links = {rank: (far[each], each) for each in far for rank in each.ranks}

    def distance(rank: int) -> float:
        if rank in culprits:
            return 0
        return links[rank][0] if rank in links else float("inf")

    start = max((rank for rank in links if rank not in culprits), key=lambda rank: (links[rank][0], -rank), default=-1)
    chain: list[WaitLink] = []
    rank = start
    while rank in links and rank not in culprits:
        here = links[rank][1]
        awaited = min(here.awaited, key=distance)
        chain.append(WaitLink(rank, here, awaited))
        rank = awaited
    return chain
