"""Ranks and places of a wait graph in words."""

from __future__ import annotations

from collections.abc import Mapping

from megascale.core.flight_record import FlightEvent
from megascale.core.rank import format_ranks
from megascale.observe.waits import WaitGraph, WaitPlace, is_issuing

SILENT_S = 2.0
"""Seconds without a heartbeat, eight beats, after which code is said to hold Python's lock."""


def describe_rank(rank: int, graph: WaitGraph, states: Mapping[int, str]) -> str:
    """Describe a rank: its phase and step, since when, the letter of its process's state, and where it is."""
    record = graph.records.get(rank)
    if record is None:
        return f"rank {rank} has no flight record"
    text = f"rank {rank} is in phase {record.phase}, step {record.step}, without progress for {record.idle_s:.1f} s"
    if state := states.get(rank):
        text += f", in state {state}"
    if record.silent_s > SILENT_S:
        text += f", without a heartbeat for {record.silent_s:.1f} s"
    if rank in graph.places:
        verb = "issuing" if is_issuing(record) else "waiting in"
        return f"{text}, {verb} {describe_operation(graph.places[rank], graph)}"
    last = next((event for event in reversed(record.last) if event.kind == "action"), None)
    return f"{text}, in no collective{describe_action(last)}"


def describe_action(event: FlightEvent | None) -> str:
    """Describe a rank's last action: ", in F of micro-batch 2 on chunk 0"; "" without one."""
    if event is None:
        return ""
    where = f" of micro-batch {event.microbatch} on chunk {event.chunk}" if event.microbatch >= 0 else ""
    return f", {'after' if event.ended_ns else 'in'} {event.name}{where}"


def describe_place(place: WaitPlace, graph: WaitGraph) -> str:
    """Describe who waits in a place, for whom."""
    missing = graph.missing[place]
    waiting = [rank for rank in graph.waiting[place] if rank not in graph.stuck] or graph.waiting[place]
    verb = "wait" if len(waiting) > 1 else "waits"
    text = f"{format_ranks(sorted(waiting))} {verb} in {describe_operation(place, graph)}"
    return f"{text} for {format_ranks(sorted(missing))}" if missing else text


def describe_operation(place: WaitPlace, graph: WaitGraph) -> str:
    """Describe the operation of a place: 'all_reduce 41 "grads" of group dp'."""
    record = graph.records[graph.waiting[place][0]]
    events = [e for e in record.last if e.group == place.key and e.sequence == place.sequence]
    part = f" {events[-1].part!r}" if events and events[-1].part else ""
    return f"{events[-1].name if events else 'operation'} {place.sequence}{part} of group {place.key}"
