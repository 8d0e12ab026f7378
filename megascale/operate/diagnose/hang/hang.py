"""The verdict about a job that makes no progress: which rank the others wait for, and why, from flight records alone.

`hang_verdict` follows the waits (`hang.waits`) to the ranks that wait for no rank:

| such a rank | kind |
|---|---|
| is stopped (state T) or has ended (Z) | stopped, dead |
| has no record | unknown |
| reads its data; a checkpoint, or waits for a disk (state D) | data; storage |
| computes (state R) | spinning |
| has no heartbeat, and does not compute: it sleeps in code that holds Python's lock | locked |
| is in no collective, or stuck before its issue | collective |
| waits for data that all others have sent | network |

If every rank waits for another, a rank has made other calls than the rest: divergence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megascale.core.rank import format_ranks
from megascale.operate.diagnose.hang.divergence import divergent_ranks
from megascale.operate.diagnose.hang.flight import MADE_OF_DUMP
from megascale.operate.diagnose.hang.waits import WaitGraph, WaitPlace, is_issuing, place_name, wait_graph
from megascale.record.layout import Phase
from megascale.record.rank_state import SILENT_S, RankState

VerdictKind = Literal[
    "stopped", "dead", "spinning", "locked", "storage", "data", "collective", "network", "divergence", "device",
    "unknown",
]  # fmt: skip

MOST_EVIDENCE = 8  # most lines of evidence

_STOPPED, _DEAD, _DISK, _RUNNING = ("T", "t"), ("Z", "X"), "D", "R"
_STORAGE_PHASES = (Phase.CHECKPOINT, Phase.LOAD)
_START_PHASES = (Phase.IMPORT, Phase.RENDEZVOUS, Phase.GROUPS)


@dataclass(frozen=True)
class Verdict:
    """The cause of a hang.

    `ranks`: the culprits, those idle for the longest first. `group`: that others wait in, "" if they wait in none.
    `confident`: a single explanation, and a single rank or link, or ranks all of which were stopped or have ended.
    `compare`: ranks whose longer records would tell more.
    """

    kind: VerdictKind
    ranks: tuple[int, ...] = ()
    group: str = ""
    evidence: tuple[str, ...] = ()
    confident: bool = True
    compare: tuple[int, ...] = ()


def hang_verdict(records: Mapping[int, RankState], states: Mapping[int, str]) -> Verdict:
    """Return the verdict about a job none of whose ranks makes progress. `states`: the letters of the processes' states
    in /proc, as far as known, by rank.
    """
    if not records:
        return Verdict("unknown", (), "", ("no rank has a flight record",), confident=False)
    graph = wait_graph(records)
    stopped = [rank for rank, state in states.items() if state in _STOPPED]
    dead = [rank for rank, state in states.items() if state in _DEAD]
    if dead or stopped:  # each on its own account: no rank's end or stop stops another
        return replace(_verdict("dead" if dead else "stopped", dead or stopped, graph, states), confident=True)
    awaited = graph.awaited()
    if culprits := [rank for rank in awaited if not graph.waits(rank)]:
        return _verdict(_kind_of_all(culprits, graph, states), culprits, graph, states)
    if graph.stuck:
        return _verdict("collective", graph.stuck, graph, states)
    lost = [place for place, missing in graph.missing.items() if not missing]
    if graph.mixed or (awaited and not lost):
        return _divergence(graph, states)
    if lost:
        return _lost_data(lost, graph, states)
    if on_device := list(graph.on_device):
        return _verdict("device", on_device, graph, states, confident=False)
    busy = list(records)
    return _verdict(_kind_of_all(busy, graph, states), busy, graph, states, confident=False)


def _kind_of_all(ranks: Iterable[int], graph: WaitGraph, states: Mapping[int, str]) -> VerdictKind:
    return Counter(_kind(graph.records.get(rank), states.get(rank, "")) for rank in ranks).most_common(1)[0][0]


def _kind(record: RankState | None, state: str) -> VerdictKind:
    """Return the kind of a rank that waits for no rank."""
    if record is None:
        return "unknown"
    locked = record.silent_s > SILENT_S and state != _DISK
    if locked and state in ("", _RUNNING):
        return "spinning" if state else "locked"
    if record.phase is Phase.DATA:
        return "data"
    if record.phase in _STORAGE_PHASES or state == _DISK:
        return "storage"
    if locked or state == _RUNNING:
        return "locked" if locked else "spinning"
    return "unknown" if record.phase in _START_PHASES else "collective"


def _verdict(
    kind: VerdictKind, ranks: Iterable[int], graph: WaitGraph, states: Mapping[int, str], *, confident: bool = True
) -> Verdict:
    culprits = sorted(ranks, key=lambda rank: (-_idle_s(graph, rank), rank))
    place = _place_waited_in(culprits, graph)
    evidence = [_describe_rank(rank, graph, states) for rank in culprits[:4]]
    if place is not None:
        evidence.append(_describe_place(place, graph))
    return Verdict(
        kind, tuple(culprits), place.key if place else "", tuple(evidence[:MOST_EVIDENCE]),
        confident and len(culprits) == 1,
    )  # fmt: skip


def _idle_s(graph: WaitGraph, rank: int) -> float:
    record = graph.records.get(rank)
    return record.idle_s if record is not None else float("inf")


def _place_waited_in(culprits: Sequence[int], graph: WaitGraph) -> WaitPlace | None:
    """Return the place of the first culprit in which most ranks wait."""
    places = [place for place, missing in graph.missing.items() if culprits and culprits[0] in missing]
    return max(places, key=lambda place: (len(graph.waiting[place]), place.key), default=None)


def _lost_data(lost: Sequence[WaitPlace], graph: WaitGraph, states: Mapping[int, str]) -> Verdict:
    """Return the verdict about places that every member has issued: ranks waiting for data, and their peers."""
    place = max(lost, key=lambda place: max(_idle_s(graph, rank) for rank in graph.waiting[place]))
    ranks = sorted(place.members if place.is_message else graph.waiting[place])
    evidence = [f"{_describe_place(place, graph)}: all {len(place.members)} ranks have issued it, the data are missing"]
    evidence += [_describe_rank(rank, graph, states) for rank in ranks[:4]]
    return Verdict("network", tuple(ranks), place.key, tuple(evidence), confident=len(ranks) <= 2)


def _divergence(graph: WaitGraph, states: Mapping[int, str]) -> Verdict:
    """Return the verdict about ranks that wait for each other."""
    ranks, evidence, certain, compare = divergent_ranks(graph)
    described = [*evidence, *(_describe_rank(rank, graph, states) for rank in ranks[:4])]
    place = _place_waited_in(ranks, graph)
    return Verdict(
        "divergence", ranks, place.key if place else "", tuple(described[:MOST_EVIDENCE]),
        confident=certain, compare=compare,
    )  # fmt: skip


def _describe_rank(rank: int, graph: WaitGraph, states: Mapping[int, str]) -> str:
    record = graph.records.get(rank)
    if record is None:
        return f"rank {rank} has no flight record"
    text = f"rank {rank} is in phase {record.phase}, step {record.step}, without progress for {record.idle_s:.1f} s"
    if record.pid == MADE_OF_DUMP:
        text = f"rank {rank} began no operation in the {record.idle_s:.1f} s before the dumps"
    if state := states.get(rank):
        text += f", in state {state}"
    if record.silent_s > SILENT_S:
        text += f", without a heartbeat for {record.silent_s:.1f} s"
    if rank in graph.places:
        verb = "issuing" if is_issuing(record) else "waiting in"
        return f"{text}, {verb} {place_name(graph.places[rank], graph)}"
    text += ", in no collective"
    if (last := next((event for event in reversed(record.last) if event.kind == "action"), None)) is not None:
        where = f" of micro-batch {last.microbatch} on chunk {last.chunk}" if last.microbatch >= 0 else ""
        text += f", {'after' if last.ended_ns else 'in'} {last.name}{where}"
    return text


def _describe_place(place: WaitPlace, graph: WaitGraph) -> str:
    missing = graph.missing[place]
    waiting = [rank for rank in graph.waiting[place] if rank not in graph.stuck] or graph.waiting[place]
    verb = "wait" if len(waiting) > 1 else "waits"
    text = f"{format_ranks(sorted(waiting))} {verb} in {place_name(place, graph)}"
    return f"{text} for {format_ranks(sorted(missing))}" if missing else text
