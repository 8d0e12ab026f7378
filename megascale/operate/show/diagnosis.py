"""The diagnosis of a run that may hang: the verdict, who waits for whom, and the culprits, from the last states of its
ranks and from the dumps of torch's flight recorder. `show.diagnosis_text` prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from megascale.operate.diagnose.hang.hang import Verdict, hang_verdict
from megascale.operate.diagnose.hang.wait_chain import WaitingSet, WaitLink, distances, wait_chain, waiting_sets
from megascale.operate.diagnose.hang.waits import wait_graph
from megascale.operate.driver.classify import hang_words
from megascale.operate.show.last_states import (
    SHARED,
    LastStates,
    StatesError,
    describe_dumps,
    notes_of_age,
    read_dumped_states,
)
from megascale.operate.show.rank_details import RankDetails, details_of, read_errors
from megascale.operate.show.run_view import RunView
from megascale.operate.show.standstill import standstill_limit_s, step_limit_s
from megascale.operate.store.settings import StoreSettings
from megascale.record.layout import Phase

Condition = Literal["hangs", "makes progress", "has ended", "is out of sight", "unknown"]
"""Conditions of a run. By the dumps of torch's flight recorder alone a run hangs without a verdict. Out of sight: old
states are left, and nothing tells whether the run has ended.
"""

RECENT_INTERVALS = 3.0  # intervals of the event store after which the states of a live run are newer
MOST_CULPRITS = 4  # most culprits whose events, stack and output are shown


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


def diagnose(view: RunView, states: LastStates, read_stack: Callable[[int], str] = lambda pid: "") -> RunDiagnosis:
    """Return the diagnosis of a run. `read_stack`: of a process on this host.

    Raises: StatesError if neither states nor dumps tell anything
    """
    recorder, suspected = describe_dumps(view.folder)
    # errors from before the start of the last ranks are those of earlier ones
    start = max((record.start for record in states.by_rank.values()), default=0.0)
    errors = [] if view.is_live else read_errors(view, start)
    causes = [error for error in errors if not error["peer_was_lost"]] or errors
    first = f"rank {causes[0]['rank']} on {causes[0]['host']}: {causes[0]['what']}" if causes else ""
    common = RunDiagnosis(view, states, "unknown", recorder=recorder, error=first, notes=states.notes)
    working = [state for state in states.by_rank.values() if state.phase is not Phase.DONE]
    if view.status == 0 or (states.by_rank and not working):
        return replace(common, condition="has ended")
    if not working:
        if not recorder:
            where = "no flight record on this host, no state in the event store, no dump of torch's flight recorder"
            reasons = f" ({'; '.join(states.notes)})" if states.notes else ""
            hint = "run the command on the host of the ranks, or keep the store on: observe.event_store"
            raise StatesError(f"{view.folder}: nothing tells what the ranks do: {where}{reasons}", hint=hint)
        dumped = read_dumped_states(view) if suspected else LastStates({})
        if dumped.by_rank:
            return _hang(replace(common, states=replace(dumped, notes=states.notes)), read_stack)
        return replace(common, condition="hangs", what=recorder) if suspected else common
    limit_s = standstill_limit_s({str(record.phase) for record in working}, view, step_limit_s(working, view))
    idle_s = min(record.idle_s for record in working)
    if view.is_live and not all(state.source == SHARED for state in states.by_rank.values()):
        idle_s = float(view.states.idle_s)  # newer than the store
    common = replace(common, idle_s=idle_s, limit_s=limit_s)
    # ranks that ended because another did not come in time, and for no other reason, had hung
    timed_out = errors and all(e["peer_was_lost"] for e in errors) and "timed out" in errors[0]["what"].lower()
    if idle_s >= limit_s or (not view.is_live and (suspected or timed_out)):
        return _hang(common, read_stack)
    if view.has_ended or errors:
        return replace(common, condition="has ended")
    slow = tuple(record.rank for record in working if record.idle_s >= limit_s)
    common = replace(common, age_s=0.0 if view.is_live else min(state.age_s for state in working))
    interval_s = view.config.observe.store_interval_s if view.config is not None else StoreSettings.interval_s
    if common.age_s > RECENT_INTERVALS * interval_s:
        return replace(common, condition="is out of sight")
    return replace(common, condition="makes progress", slow_ranks=slow)


def _hang(common: RunDiagnosis, read_stack: Callable[[int], str]) -> RunDiagnosis:
    view, states = common.view, common.states
    records = states.by_rank
    verdict = hang_verdict(records, {rank: state.letter for rank, state in records.items() if state.letter})
    sets = waiting_sets(wait_graph(records))
    far = distances(sets, verdict.ranks)
    ordered = sorted(sets, key=lambda each: far.get(each, len(sets) + 1))
    culprits = verdict.ranks[:MOST_CULPRITS]
    return replace(
        common,
        condition="hangs",
        idle_s=max([common.idle_s, *(records[rank].idle_s for rank in verdict.ranks if rank in records)]),
        verdict=verdict,
        what=hang_words(verdict, records),
        waiting=tuple(ordered),
        links=tuple(far.get(each, 0) for each in ordered),
        chain=tuple(wait_chain(sets, verdict.ranks)),
        culprits=tuple(details_of(view, rank, records.get(rank), read_stack) for rank in culprits),
        notes=(*states.notes, *(notes_of_age(view, states, common.idle_s) if view.is_live else ())),
    )
