"""The wait graph of a job, from the flight records of its ranks: which ranks each rank waits for.

A rank waits in a *place*: a collective or control call of a group, or a message, with its sequence number. It waits for
those members of the group that are missing in the place, in this order:

1. members that have not entered it;
2. members that have entered it and have not issued it: stuck in between;
3. members that have issued it, do not wait in it and have not completed it: a collective of several rounds needs them.

If none is missing, the data themselves are: they were sent, or should have been, and have not arrived.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from megascale.record.layout import COLLECTIVE, CONTROL, PHASES, RECEIVE, SEND, Phase
from megascale.record.rank_state import GroupState, RankRuns, RankState

Node = TypeVar("Node", bound=Hashable)

_ORDER = {phase: index for index, phase in enumerate(PHASES)}
_JOINING = (Phase.RENDEZVOUS, Phase.GROUPS)  # a rank waits for ranks that are not as far, and no group tells of it


class WaitPlace(NamedTuple):
    """A communication that ranks wait in. `key`: of the group in their flight records. `members`: the group's ranks, or
    the waiting rank and its peer.
    """

    key: str
    members: RankRuns
    sequence: int

    @property
    def is_message(self) -> bool:
        return f" {SEND}" in self.key or f" {RECEIVE}" in self.key


@dataclass
class WaitGraph:
    """The waits of a job's ranks for each other.

    `places`: by waiting rank. `waiting`: the ranks that wait in a place, `missing`: those that the place waits for.
    `mixed`: places in which ranks have made different calls. `on_phase`, `on_device`: the ranks that a rank in no place
    waits for, while it joins or leaves the job, or waits for its device; ranks that wait for the same ones share the
    tuple, which for a whole job would be quadratic otherwise. `stuck`: ranks that issue what nobody else is
    missing in, so that they wait for no rank.
    """

    records: Mapping[int, RankState]
    places: dict[int, WaitPlace] = field(default_factory=dict)
    waiting: dict[WaitPlace, list[int]] = field(default_factory=dict)
    missing: dict[WaitPlace, tuple[int, ...]] = field(default_factory=dict)
    mixed: set[WaitPlace] = field(default_factory=set)
    stuck: set[int] = field(default_factory=set)
    on_phase: dict[int, tuple[int, ...]] = field(default_factory=dict)
    on_device: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def waits(self, rank: int) -> bool:
        """Return True if a rank waits, be it for a rank or for data."""
        return (rank in self.places and rank not in self.stuck) or rank in self.on_phase or rank in self.on_device

    def contested(self) -> Iterator[tuple[str, RankRuns, set[int]]]:
        """Yield the groups whose ranks wait for each other: name, members, and the ranks that wait or are awaited."""
        for place, missing in self.missing.items():
            if missing or place in self.mixed:
                members = RankRuns(()) if place.is_message else place.members
                yield place.key.partition(" ")[0], members, {*self.waiting[place], *missing}
        in_flight = {
            (key, state.ranks)
            for rank in self.on_device
            for key, state in self.records[rank].groups.items()
            if state.kind == COLLECTIVE and state.ranks is not None and state.issued > state.completed
        }
        for key, members in in_flight:
            yield key.partition(" ")[0], members, set(members)

    def cycle(self) -> tuple[int, ...]:
        """Return the ranks in which every chain of waits ends: all wait for each other."""
        components = closed_components(self._edges())
        return tuple(sorted(node for component in components for node in component if isinstance(node, int)))

    def _edges(self) -> dict[object, Sequence[object]]:
        """Return the place or tuple of ranks that each rank waits for, and the ranks of each place and tuple."""
        edges: dict[object, Sequence[object]] = {}
        for place, missing in self.missing.items():
            edges[place] = tuple(place.members) if place in self.mixed else missing
        for rank in self.records:
            if rank in self.places:
                edges[rank] = (self.places[rank],)
            elif awaited := self.on_phase.get(rank) or self.on_device.get(rank):
                edges[rank] = (("ranks", id(awaited)),)
                edges["ranks", id(awaited)] = awaited
            else:
                edges[rank] = ()
        return edges

    def awaited(self) -> set[int]:
        """Return the ranks that others wait for."""
        found: set[int] = set()
        of_ranks = {id(ranks): ranks for waits in (self.on_phase, self.on_device) for ranks in waits.values()}
        for missing in (*self.missing.values(), *of_ranks.values()):
            found.update(missing)
        return found


def wait_graph(records: Mapping[int, RankState]) -> WaitGraph:
    """Return the wait graph of the ranks with a record. Ranks without one count as missing wherever they belong."""
    graph = WaitGraph(records)
    for rank, record in records.items():
        if (wait := record.wait) is not None and (state := record.groups.get(wait.group)) is not None:
            members = RankRuns.from_ranks((rank, state.peer)) if state.peer >= 0 else state.ranks
            graph.places[rank] = place = WaitPlace(wait.group, members or RankRuns(()), wait.sequence)
            graph.waiting.setdefault(place, []).append(rank)
    for place, waiting in graph.waiting.items():
        graph.missing[place] = missing = _missing_in(place, waiting, records)
        if set(missing) <= set(waiting):
            graph.stuck.update(rank for rank in waiting if is_issuing(records[rank]))
        if not missing and not place.is_message and _is_mixed(place, waiting, records):
            graph.mixed.add(place)
    _add_phases(graph)
    _add_devices(graph)
    return graph


def place_name(place: WaitPlace, graph: WaitGraph) -> str:
    """Describe a place: 'all_reduce 41 "grads" of group dp'."""
    record = graph.records[graph.waiting[place][0]]
    events = [e for e in record.last if e.group == place.key and e.sequence == place.sequence]
    part = f" {events[-1].part!r}" if events and events[-1].part else ""
    return f"{events[-1].name if events else 'operation'} {place.sequence}{part} of group {place.key}"


def is_issuing(record: RankState) -> bool:
    """Return True if a rank has entered a communication and not issued it."""
    return record.wait is not None and record.wait.kind == "issuing"


def _missing_in(place: WaitPlace, waiting: Sequence[int], records: Mapping[int, RankState]) -> tuple[int, ...]:
    """Return the missing ranks of a place, by the order of the module's list."""
    if place.is_message:
        return _missing_peer(place, waiting[0], records)
    states = {rank: _state(records, rank, place.key) for rank in place.members}
    if absent := tuple(rank for rank, state in states.items() if state is None or state.entered <= place.sequence):
        return absent
    known = {rank: state for rank, state in states.items() if state is not None}
    if unissued := tuple(rank for rank, state in known.items() if state.issued <= place.sequence):
        return unissued
    here = set(waiting)
    return tuple(rank for rank, state in known.items() if state.completed <= place.sequence and rank not in here)


def _is_mixed(place: WaitPlace, waiting: Sequence[int], records: Mapping[int, RankState]) -> bool:
    """Return True if ranks that wait in a place have made different calls there, which never end."""
    calls = {
        (event.name, event.bytes)
        for rank in waiting
        for event in records[rank].last
        if event.group == place.key and event.sequence == place.sequence
    }
    return len(calls) > 1


def _missing_peer(place: WaitPlace, rank: int, records: Mapping[int, RankState]) -> tuple[int, ...]:
    """Return the peer of a message if it has not issued its side."""
    state = records[rank].groups[place.key]
    side = f"{state.name} {RECEIVE if state.kind == SEND else SEND} {rank}"
    peer = _state(records, state.peer, side)
    return (state.peer,) if peer is None or peer.issued <= place.sequence else ()


def _state(records: Mapping[int, RankState], rank: int, key: str) -> GroupState | None:
    record = records.get(rank)
    return record.groups.get(key) if record is not None else None


def _add_phases(graph: WaitGraph) -> None:
    """Joining ranks wait for ranks behind them; ranks after their end wait for the rest."""
    records = graph.records
    if not records:
        return
    world = next(iter(records.values())).world
    absent = tuple(rank for rank in range(world) if rank not in records)
    by_phase: dict[Phase, list[int]] = {}
    for rank, record in records.items():
        by_phase.setdefault(record.phase, []).append(rank)
    for phase in (*_JOINING, Phase.DONE):
        behind = [rank for other, ranks in by_phase.items() if _ORDER[other] < _ORDER[phase] for rank in ranks]
        awaited = (*absent, *behind)
        for rank in by_phase.get(phase, ()):
            if rank not in graph.places and awaited:
                graph.on_phase[rank] = awaited


def _add_devices(graph: WaitGraph) -> None:
    """A rank that waits for its device waits for the ranks that have not issued what the device is at: for itself, too,
    if others are as far behind.
    """
    waiting = [rank for rank, record in graph.records.items() if record.wait and record.wait.kind == "device"]
    behind: dict[tuple[str, RankRuns], tuple[int, ...]] = {}
    joined: dict[tuple[tuple[int, ...], frozenset[int]], tuple[int, ...]] = {}
    for rank in waiting:
        groups: dict[int, tuple[int, ...]] = {}
        peers: set[int] = set()
        for key, state in graph.records[rank].groups.items():
            if state.issued <= state.completed or state.kind == CONTROL:
                continue
            if state.peer >= 0:
                place = WaitPlace(key, RankRuns.from_ranks((rank, state.peer)), state.issued - 1)
                peers.update(_missing_peer(place, rank, graph.records))
            elif state.ranks is not None:
                if (key, state.ranks) not in behind:  # those that have issued less than another one
                    issued = {at: of.issued if (of := _state(graph.records, at, key)) else 0 for at in state.ranks}
                    most = max(issued.values())
                    behind[key, state.ranks] = tuple(at for at, count in issued.items() if count < most)
                found = behind[key, state.ranks]
                groups[id(found)] = found
        same = tuple(groups), frozenset(peers)
        if same not in joined:
            joined[same] = tuple(sorted(peers.union(*groups.values())))
        graph.on_device[rank] = joined[same] if joined[same] != (rank,) else ()


def closed_components(edges: Mapping[Node, Sequence[Node]]) -> Iterator[set[Node]]:
    """Yield the strongly connected components without edges to other nodes (Tarjan 1972). `edges`: targets by node."""
    order: dict[Node, int] = {}
    low: dict[Node, int] = {}
    path: list[Node] = []
    complete: set[Node] = set()
    for root in edges:
        visits = [(root, iter(edges[root]))] if root not in order else []
        while visits:
            node, targets = visits[-1]
            if node not in order:
                order[node] = low[node] = len(order)
                path.append(node)
            for target in targets:
                if target not in order:
                    visits.append((target, iter(edges.get(target, ()))))
                    break
                if target not in complete:
                    low[node] = min(low[node], order[target])
            else:
                visits.pop()
                if visits:
                    below = visits[-1][0]
                    low[below] = min(low[below], low[node])
                if low[node] == order[node]:
                    component = _take_down_to(node, path)
                    complete |= component
                    if all(target in component for member in component for target in edges.get(member, ())):
                        yield component


def _take_down_to(node: Node, path: list[Node]) -> set[Node]:
    taken = {node}
    while (last := path.pop()) != node:
        taken.add(last)
    return taken
