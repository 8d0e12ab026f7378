"""The diagnosis of a run that may hang: the verdict, who waits for whom, and the culprits, from the last states of its
ranks and from the dumps of torch's flight recorder. `show.diagnosis_text` prints it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megascale.core.rank import format_ranks
from megascale.core.units import format_duration
from megascale.operate.diagnose.hang.flight import DUMP_FOLDER, find_suspect
from megascale.operate.diagnose.hang.hang import Verdict, hang_verdict
from megascale.operate.diagnose.hang.wait_chain import WaitingSet, WaitLink, distances, wait_chain, waiting_sets
from megascale.operate.diagnose.hang.waits import wait_graph
from megascale.operate.driver.classify import classify_hang
from megascale.operate.driver.incidents import Culprit
from megascale.operate.node.failure import read_records
from megascale.operate.node.stacks import stack_of
from megascale.operate.show.last_states import SHARED, LastStates, StatesError, read_dumped_states
from megascale.operate.show.rank_details import RankDetails, details_of, log_folders
from megascale.operate.show.run_view import RunView
from megascale.operate.show.standstill import standstill_limit_s, step_limit_s
from megascale.operate.store.settings import StoreSettings
from megascale.record.layout import Phase
from megascale.record.rank_state import SILENT_S, RankState

Condition = Literal["hangs", "makes progress", "has ended", "is out of sight", "unknown"]
"""Conditions of a run. By the dumps of torch's flight recorder alone a run hangs without a verdict. Out of sight: old
states are left, and nothing tells whether the run has ended.
"""

RECENT_INTERVALS = 3.0
"""Intervals of the event store after which the states of a live run are newer."""

MOST_CULPRITS = 4
"""Most culprits whose events, stack and output are shown."""


@dataclass(frozen=True)
class RunDiagnosis:
    """The condition of a run, and the verdict if it hangs.

    `idle_s`: for which no rank had made progress when it was last seen, and the limit from which that is a hang.
    `age_s`: of the newest state, where nobody says what the ranks do now.
    `slow_ranks`: ranks beyond the limit while others make progress. `verdict`, `what` and `culprits`: of a hang.
    `waiting`: nearest the culprits first; `links`: of each to a culprit, 0 if none leads there. `recorder`: what the
    dumps of torch's flight recorder say, "" without dumps. `error`: the first of a run that has ended.
    """

    view: RunView
    states: LastStates
    condition: Condition
    idle_s: float = 0.0
    limit_s: float = 0.0
    age_s: float = 0.0
    slow_ranks: tuple[int, ...] = ()
    verdict: Verdict | None = None
    what: str = ""
    waiting: tuple[WaitingSet, ...] = ()
    links: tuple[int, ...] = ()
    chain: tuple[WaitLink, ...] = ()
    culprits: tuple[RankDetails, ...] = ()
    recorder: str = ""
    error: str = ""
    notes: tuple[str, ...] = ()


def diagnose(view: RunView, states: LastStates, read_stack: Callable[[int], str] = stack_of) -> RunDiagnosis:
    """Return the diagnosis of a run. `read_stack`: of a process on this host.

    Raises: StatesError if neither states nor dumps tell anything
    """
    recorder, suspected = _recorder(view.folder)
    errors = [] if view.is_live else _errors(view, states.by_rank.values())
    common = RunDiagnosis(view, states, "unknown", recorder=recorder, error=_first(errors), notes=states.notes)
    working = [state for state in states.by_rank.values() if state.phase is not Phase.DONE]
    if view.status == 0 or (states.by_rank and not working):
        return replace(common, condition="has ended")
    if not working:
        if not recorder:
            raise _nothing_known(view, states)
        dumped = read_dumped_states(view) if suspected else LastStates({})
        if dumped.by_rank:
            return _hang(replace(common, states=replace(dumped, notes=states.notes)), read_stack)
        return replace(common, condition="hangs", what=recorder) if suspected else common
    step_s = step_limit_s(working, view)
    limit_s = standstill_limit_s({str(record.phase) for record in working}, view, step_s)
    idle_s = min(record.idle_s for record in working)
    if view.is_live and not all(state.source == SHARED for state in states.by_rank.values()):
        idle_s = float(view.states.idle_s)  # newer than the store
    common = replace(common, idle_s=idle_s, limit_s=limit_s)
    if idle_s >= limit_s or (not view.is_live and (suspected or _ended_by_timeout(errors))):
        return _hang(common, read_stack)
    if view.has_ended or errors:
        return replace(common, condition="has ended")
    slow = tuple(record.rank for record in working if record.idle_s >= limit_s)
    common = replace(common, age_s=0.0 if view.is_live else min(state.age_s for state in working))
    if common.age_s > RECENT_INTERVALS * _interval_s(view):
        return replace(common, condition="is out of sight")
    return replace(common, condition="makes progress", slow_ranks=slow)


def _interval_s(view: RunView) -> float:
    return view.config.observe.store_interval_s if view.config is not None else StoreSettings.interval_s


def _errors(view: RunView, records: Iterable[RankState]) -> list[Mapping[str, Any]]:
    """Return the errors with which ranks ended, the earliest first; without files that cannot be read. `records`: the
    last of the ranks; errors from before their start are those of earlier ranks.
    """
    start = max((record.start for record in records), default=0.0)
    for folder in log_folders(view):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if found := read_records(folder):
                return [error for error in found.values() if error["what"] and error["time"] >= start]
    return []


def _first(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return the first error that does not only report the loss of another rank, else the first."""
    causes = [error for error in errors if not error["peer_was_lost"]] or errors
    return f"rank {causes[0]['rank']} on {causes[0]['host']}: {causes[0]['what']}" if causes else ""


def _ended_by_timeout(errors: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if ranks ended because another did not come in time, and for no other reason: they had hung."""
    return bool(errors) and all(e["peer_was_lost"] for e in errors) and "timed out" in errors[0]["what"].lower()


def _nothing_known(view: RunView, states: LastStates) -> StatesError:
    where = "no flight record on this host, no state in the event store, no dump of torch's flight recorder"
    reasons = f" ({'; '.join(states.notes)})" if states.notes else ""
    hint = "run the command on the host of the ranks, or keep the store on: observe.store"
    return StatesError(f"{view.folder}: nothing tells what the ranks do: {where}{reasons}", hint=hint)


def _hang(common: RunDiagnosis, read_stack: Callable[[int], str]) -> RunDiagnosis:
    view, states = common.view, common.states
    records = states.by_rank
    verdict = hang_verdict(records, states.letters)
    sets = waiting_sets(wait_graph(records))
    far = distances(sets, verdict.ranks)
    ordered = sorted(sets, key=lambda each: far.get(each, len(sets) + 1))
    idle_s = max([common.idle_s, *(records[rank].idle_s for rank in verdict.ranks if rank in records)])
    return replace(
        common,
        condition="hangs",
        idle_s=idle_s,
        verdict=verdict,
        what=_what(verdict, states),
        waiting=tuple(ordered),
        links=tuple(far.get(each, 0) for each in ordered),
        chain=tuple(wait_chain(sets, verdict.ranks)),
        culprits=tuple(
            details_of(view, rank, states.by_rank.get(rank), read_stack) for rank in verdict.ranks[:MOST_CULPRITS]
        ),
        notes=(*states.notes, *_old_states(view, states, common.idle_s)),
    )


def _what(verdict: Verdict, states: LastStates) -> str:
    """Return the verdict in words. A rank without a heartbeat, of whose process nothing is known, may be stopped."""
    if verdict.kind == "locked" and verdict.confident and verdict.ranks[0] not in states.letters:
        rank = verdict.ranks[0]
        nodes = (states.nodes[rank],) if rank in states.nodes else ()
        silent_s = states.by_rank[rank].silent_s
        if silent_s > SILENT_S:
            why = "it is stopped (SIGSTOP, a debugger or a frozen container), or code holds Python's lock"
            return f"{Culprit((rank,), nodes)} has had no heartbeat for {format_duration(silent_s)}: {why}"
    return classify_hang(verdict, 0.0, states.nodes, tuple(states.by_rank), {}).what


def _old_states(view: RunView, states: LastStates, idle_s: float) -> list[str]:
    """Return a note about states from before the last progress of the job."""
    if not view.is_live:
        return []
    old = [rank for rank, state in states.by_rank.items() if state.age_s > max(1.0, idle_s)]
    missing = sorted(set(range(view.world)) - states.by_rank.keys())
    notes = [f"the states of {format_ranks(old)} are from before the hang: read the verdict with care"] if old else []
    return notes + ([f"nothing is known about {format_ranks(missing)}"] if missing else [])


def _recorder(run: Path) -> tuple[str, bool]:
    """Return what the dumps of torch's flight recorder say, "" without dumps, and True if they name a rank."""
    count = sum(1 for _ in (run / DUMP_FOLDER).glob("*_rank_*"))
    if not count:
        return "", False
    suspect = find_suspect(run / DUMP_FOLDER)
    text = f"{count} dump{'s' if count > 1 else ''}: {suspect or 'no rank is known to wait for another'}"
    return text, suspect is not None


def nodes_of(ranks: Sequence[int], states: LastStates) -> list[str]:
    """Return the known nodes of ranks."""
    return sorted({states.nodes[rank] for rank in ranks if rank in states.nodes})
