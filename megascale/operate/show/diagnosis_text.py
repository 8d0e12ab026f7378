"""A diagnosis as text for the person on call, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megascale.core.rank import format_ranks
from megascale.core.units import format_duration
from megascale.operate.show.diagnosis import RunDiagnosis
from megascale.operate.show.last_states import DUMPED
from megascale.operate.show.rank_details import RankDetails
from megascale.record.rank_state import FlightEvent

MOST_SETS = 16  # most rows of the table of waits
MOST_LINKS = 12  # most links of the chain: half of them at each end
MOST_EVENTS = 8  # most of a culprit's events
LOG_LINES = 8  # most lines of a culprit's output
MOST_FRAMES = 30  # most lines of a thread's stack
FEW = 6  # most ranks that a cell of the table names


def diagnosis_text(found: RunDiagnosis) -> str:
    """Return a diagnosis as text."""
    return "\n".join(_lines(found))


def _lines(found: RunDiagnosis) -> Iterator[str]:
    yield from _head(found)
    for source, ranks in found.states.sources().items():
        ages = [found.states.by_rank[rank].age_s for rank in ranks]
        since = f", {format_duration(max(ages))} ago" if max(ages) >= 1 else ", now"
        who = f"all {len(ranks)} ranks" if 1 < len(ranks) == found.view.world else format_ranks(ranks)
        yield f"seen     {who}: {source}{since}"
    yield from (f"note     {note}" for note in found.notes)
    if found.verdict is not None:
        yield from _section("evidence", found.verdict.evidence)
        yield from _section("where ranks wait, nearest to the culprit first", list(_table(found)))
        yield from _section("who waits for whom", list(_chain(found)))
        for culprit in found.culprits:
            yield from _section(f"rank {culprit.rank}", list(_culprit(culprit)))
    if found.recorder:
        yield from _section("torch's flight recorder", [found.recorder])
    if found.view.incidents:
        last = found.view.incidents[-1]
        yield from _section("the driver's last incident", [f"{last.id}: {last.what}; {last.action.reason}"])


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield title
        yield from (f"  {line}" for line in lines)


def _head(found: RunDiagnosis) -> Iterator[str]:
    """Yield the verdict first, then the run."""
    view, verdict = found.view, found.verdict
    idle = format_duration(found.idle_s)
    newest = max((record.step for record in found.states.by_rank.values()), default=0) or view.step
    step = f"{newest:,}{f' of {view.steps:,}' if view.steps else ''}"
    if verdict is not None:
        yield f"HANGS: {found.what}" if view.is_live else f"HUNG when last seen: {found.what}"
        sure = "a single explanation" if verdict.confident else "not certain: see the evidence"
        where = f", in group {verdict.group}" if verdict.group else ""
        yield f"verdict  {verdict.kind}{where}; {sure}"
        yield f"hang     no rank has made progress for {idle}, step {step}"
    elif found.condition == "hangs":
        yield f"HUNG, by torch's flight recorder alone: {found.what}"
    elif found.condition == "makes progress":
        last = f"as of {format_duration(found.age_s)} ago" if found.age_s else f"the last was {idle} ago"
        yield f"NO HANG: the run makes progress, step {step}; {last}"
        if found.slow_ranks:
            yield f"but {format_ranks(found.slow_ranks)} made none for {format_duration(found.limit_s)} or more"
        else:
            yield f"a standstill of {format_duration(found.limit_s)} is called a hang"
    elif found.condition == "is out of sight":
        seen = f"when last seen, {format_duration(found.age_s)} ago, step {step}"
        yield f"NO HANG {seen}: the run is not running any more, or out of sight"
    elif found.condition == "has ended":
        if view.status and view.incidents and view.incidents[-1].class_ == "hang":  # a driver stopped it
            yield f"HUNG before its end ({view.state}): {view.incidents[-1].what}, step {step}"
        else:
            yield f"NO HANG: the run has ended ({view.state}), step {step}"
    else:
        yield "UNKNOWN: no state of a rank is left, only dumps of torch's flight recorder, in which no rank waits"
    yield f"run      {view.folder}: {view.layout}; {view.state}"
    if found.error:
        yield f"error    {found.error}"


def _table(found: RunDiagnosis) -> Iterator[str]:
    rows = [("group", "sequence", "members", "wait there", "missing")]
    for each in found.waiting[:MOST_SETS]:
        rows.append((
            each.group or each.what.removeprefix("in ").removeprefix("for its "),
            str(each.sequence) if each.sequence >= 0 else "",
            str(len(each.members) or ""),
            _few(each.ranks),
            "made different calls" if each.mixed else _few(each.awaited) or "all have come",
        ))  # fmt: skip
    if len(rows) == 1:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if rest := found.waiting[MOST_SETS:]:
        yield f"and {len(rest)} more places, in which {sum(len(each.ranks) for each in rest)} ranks wait"


def _few(ranks: Sequence[int]) -> str:
    rest = f" and {len(ranks) - FEW} more" if len(ranks) > FEW else ""
    return ", ".join(map(str, ranks[:FEW])) + rest


def _chain(found: RunDiagnosis) -> Iterator[str]:
    links = list(map(str, found.chain))
    if len(links) > MOST_LINKS:
        half = MOST_LINKS // 2
        links[half:-half] = [f"... {len(links) - 2 * half} more"]
    yield from links
    if found.chain:
        last = found.chain[-1].awaited
        own = next((each for each in found.waiting if last in each.ranks), None)
        yield f"rank {last} waits for no rank" if own is None else str(own)


def _culprit(culprit: RankDetails) -> Iterator[str]:
    state = culprit.state
    node = f" on {state.node}" if state is not None and state.node else ""
    if state is None:
        yield "has no flight record: its node may be lost, or it has not begun"
    elif state.source == DUMPED:
        yield f"its dump{node} has no operation of the last {format_duration(state.idle_s)}"
    else:
        yield f"process {state.pid}{node}{f', in state {state.letter}' if state.letter else ''}"
        since = format_duration((state.read_ns - state.phase_since_ns) / 1e9)
        silent = f"last heartbeat {state.silent_s:.1f} s before it was seen"
        yield f"phase {state.phase} for {since}, step {state.step}; {silent}"
    if events := _events(culprit):
        yield "last events:"
        yield from (f"  {event}" for event in events)
    if culprit.stack:
        yield "stack:"
        # the first thread in py-spy's text is the main thread
        head, *threads = culprit.stack.split("\nThread ")
        first = f"Thread {threads[0]}".rstrip() if threads else head
        yield from (f"  {line}" for line in first.splitlines()[:MOST_FRAMES])
        if len(threads) > 1:
            yield f"  and {len(threads) - 1} more threads: see --json"
    if culprit.log is not None:
        yield f"end of its output, {culprit.log}:"
        yield from (f"  {line}" for line in culprit.output[-LOG_LINES:])


def _events(culprit: RankDetails) -> list[str]:
    return [] if culprit.state is None else [_event(event) for event in culprit.state.last[-MOST_EVENTS:]]


def _event(event: FlightEvent) -> str:
    words = [event.name, event.part]
    words.append(f"layer {event.layer}" if event.layer >= 0 else "")
    words.append(f"micro-batch {event.microbatch}" if event.microbatch >= 0 else "")
    words.append(f"chunk {event.chunk}" if event.chunk >= 0 else "")
    words.append(f"of {event.group} {event.sequence}" if event.group else "")
    took = f"{(event.ended_ns - event.issued_ns) / 1e6:.1f} ms" if event.ended_ns else "not ended"
    return f"step {event.step}  {' '.join(filter(None, words))}: {took}"


def diagnosis_json(found: RunDiagnosis) -> dict[str, Any]:
    """Return a diagnosis as JSON."""
    verdict, states = found.verdict, found.states
    return {
        "condition": found.condition,
        "state": found.view.state,
        "what": found.what,
        "idle_s": round(found.idle_s, 1),
        "limit_s": round(found.limit_s, 1),
        "age_s": round(found.age_s, 1),
        "slow_ranks": list(found.slow_ranks),
        "verdict": None if verdict is None else {
            "kind": verdict.kind, "ranks": list(verdict.ranks), "nodes": states.nodes(verdict.ranks),
            "group": verdict.group, "confident": verdict.confident, "evidence": list(verdict.evidence),
        },
        "sources": [
            {"source": source, "ranks": ranks, "age_s": round(max(states.by_rank[rank].age_s for rank in ranks), 1)}
            for source, ranks in states.sources().items()
        ],
        "waiting": [
            {
                "what": each.what, "group": each.group, "sequence": each.sequence, "members": list(each.members),
                "ranks": list(each.ranks), "awaited": list(each.awaited), "different_calls": each.mixed,
            }
            for each in found.waiting
        ],
        "chain": [{"rank": link.rank, "what": link.waiting.what, "awaited": link.awaited} for link in found.chain],
        "culprits": [_culprit_json(culprit) for culprit in found.culprits],
        "flight_recorder": found.recorder,
        "error": found.error,
        "notes": list(found.notes),
    }  # fmt: skip


def _culprit_json(culprit: RankDetails) -> dict[str, Any]:
    state = culprit.state
    seen = {} if state is None else {
        "pid": state.pid, "node": state.node, "letter": state.letter, "phase": str(state.phase),
        "step": state.step, "idle_s": state.idle_s, "silent_s": state.silent_s,
    }  # fmt: skip
    return {
        "rank": culprit.rank, **seen, "events": _events(culprit), "stack": culprit.stack,
        "log": str(culprit.log) if culprit.log else "", "output": list(culprit.output[-LOG_LINES:]),
    }  # fmt: skip
