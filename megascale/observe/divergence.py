"""Ranks that made other calls than the rest: found where every rank of a hang waits for another.

1. Ranks of the same role (stage) make the same calls: the n-th operation of a group has the same name, tensor,
   step and micro-batch on all. After a call was left out, it has not: the rank that differs from most is wrong.
2. Two ranks of a cycle contradict each other: W waits in a place A in which M is missing, and M waits in a place B.
   Witnesses decide, other ranks that wait in B or in the same place of their own group: if they have been in their
   place A before, M has left it out. If not, and M waits in B for W, then W has left out B, or made a call too many.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megascale.core.flight_layout import CONTROL, RECEIVE, SEND
from megascale.core.flight_record import FlightEvent, FlightRecord
from megascale.core.rank import format_ranks
from megascale.observe.waits import WaitGraph, WaitPlace

MOST_PAIRS = 64
"""Most pairs (W, M) of a place that are compared."""

MOST_WITNESSES = 64
"""Most witnesses of a pair."""

COMPARED_EVENTS = 8
"""Newest operations of each rank and group whose names are compared."""

_Role = frozenset[tuple[str, str, int]]


class _Call(NamedTuple):
    """The n-th operation of the groups that ranks of a role have under the same name."""

    role: _Role
    group: tuple[str, str, int]
    sequence: int


class _Operation(NamedTuple):
    """The facts of an operation that are equal on ranks of a role."""

    name: str
    part: str
    layer: int
    step: int
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        tensor = f" {self.part!r}" if self.part else ""
        layer = f" of layer {self.layer}" if self.layer >= 0 else ""
        micro_batch = f", micro-batch {self.microbatch}" if self.microbatch >= 0 else ""
        return f"{self.name}{tensor}{layer} in step {self.step}{micro_batch}"


def divergent_ranks(graph: WaitGraph) -> tuple[list[int], list[str]]:
    """Return the ranks that made other calls than the rest, and the evidence. All ranks of the cycle if nothing tells
    them apart.
    """
    if (found := _odd_calls(graph))[0] or (found := _contradictions(graph))[0]:
        return found
    cycle = sorted(graph.awaited())
    return cycle, [f"{format_ranks(cycle)} wait for each other: they made different calls"]


def _odd_calls(graph: WaitGraph) -> tuple[list[int], list[str]]:
    """Return the ranks one of whose operations differs from that of most ranks of their role."""
    made: defaultdict[_Call, dict[int, _Operation]] = defaultdict(dict)
    keys = {place.key.partition(" ")[0] for place in graph.waiting}
    for rank, record in graph.records.items():
        role = _role(record)
        for event in _compared_events(record):
            state = record.groups.get(event.group)
            if state is not None and state.name in keys:
                call = _Call(role, (state.name, state.kind, _distance(rank, state.peer)), event.sequence)
                made[call][rank] = _Operation(
                    event.name, event.part, event.layer, event.step, event.chunk, event.microbatch
                )
    odd: dict[int, str] = {}
    for call, by_rank in made.items():
        (usual, count), *others = Counter(by_rank.values()).most_common()
        if others and 2 * count > len(by_rank):
            for rank, operation in by_rank.items():
                if operation != usual:
                    group = " ".join(call.group[:2])
                    text = f"{group} {call.sequence} is {operation} on rank {rank}, and {usual} on {count} other ranks"
                    odd.setdefault(rank, text)
    return sorted(odd), [odd[rank] for rank in sorted(odd)[:2]]


def _compared_events(record: FlightRecord) -> Iterator[FlightEvent]:
    """Yield the newest operations of each group, newest first."""
    counts: Counter[str] = Counter()
    for event in reversed(record.last):
        if event.group and event.kind != CONTROL:
            counts[event.group] += 1
            if counts[event.group] <= COMPARED_EVENTS:
                yield event


def _contradictions(graph: WaitGraph) -> tuple[list[int], list[str]]:
    """Return the ranks that most witnesses contradict."""
    by_name: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for place, ranks in graph.waiting.items():
        by_name[place.key, place.sequence] += ranks
    blamed: Counter[int] = Counter()
    reasons: dict[int, str] = {}
    for place, missing in graph.missing.items():
        for waiting, absent in _pairs(graph.waiting[place], missing):
            if (other := graph.places.get(absent)) is None:
                continue
            found = [rank for rank in by_name[other.key, other.sequence] if rank not in (waiting, absent)]
            witnesses = _of_same_role(found, absent, graph)
            before = [rank for rank in witnesses if _has_been(rank, place, waiting, absent, graph)]
            if before:
                blamed[absent] += len(before)
                reasons[absent] = _left_out(absent, place, other, before)
            if waiting in graph.missing[other] and len(before) < len(witnesses):
                not_before = [rank for rank in witnesses if rank not in before]
                blamed[waiting] += len(not_before)
                reasons[waiting] = _too_early(waiting, place, other, not_before)
    most = max(blamed.values(), default=0)
    culprits = sorted(rank for rank, count in blamed.items() if count == most)
    return culprits, [reasons[rank] for rank in culprits[:2]]


def _has_been(witness: int, place: WaitPlace, waiting: int, absent: int, graph: WaitGraph) -> bool:
    """Return True if a witness has entered its own place A, as `absent` should have."""
    state = graph.records[waiting].groups[place.key]
    key = place.key
    if state.peer >= 0:
        key = f"{state.name} {RECEIVE if state.kind == SEND else SEND} {witness + waiting - absent}"
    own = graph.records[witness].groups.get(key)
    return own is not None and own.entered > place.sequence


def _pairs(waiting: Sequence[int], missing: Sequence[int]) -> Iterable[tuple[int, int]]:
    pairs = ((rank, absent) for absent in missing for rank in waiting)
    return (pair for pair, _ in zip(pairs, range(MOST_PAIRS), strict=False))


def _of_same_role(ranks: Sequence[int], rank: int, graph: WaitGraph) -> list[int]:
    """Return those of `ranks` with the role of `rank`, or all if there are none."""
    role = _role(graph.records[rank])
    alike = [other for other in ranks[: 16 * MOST_WITNESSES] if _role(graph.records[other]) == role]
    return (alike or list(ranks))[:MOST_WITNESSES]


def _role(record: FlightRecord) -> _Role:
    """Return the facts that are equal on ranks that make the same calls: groups, and the distance of peers."""
    return frozenset((state.name, state.kind, _distance(record.rank, state.peer)) for state in record.groups.values())


def _distance(rank: int, peer: int) -> int:
    return peer - rank if peer >= 0 else 0


def _left_out(rank: int, place: WaitPlace, other: WaitPlace, witnesses: Sequence[int]) -> str:
    return (
        f"rank {rank} reached {other.key} {other.sequence} without {place.key} {place.sequence}, "
        f"which {format_ranks(sorted(witnesses))} entered before"
    )


def _too_early(rank: int, place: WaitPlace, other: WaitPlace, witnesses: Sequence[int]) -> str:
    return (
        f"rank {rank} is in {place.key} {place.sequence}, which {format_ranks(sorted(witnesses))} in "
        f"{other.key} {other.sequence} did not enter before"
    )
