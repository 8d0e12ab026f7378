"""How long ranks may make no progress, and why they make none."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from megascale.config.fault import FaultConfig
from megascale.core.flight_files import process_states
from megascale.core.flight_layout import Phase
from megascale.core.flight_record import FlightRecord
from megascale.operate.diagnose.hang.hang import hang_verdict
from megascale.operate.driver.classify import classify_hang
from megascale.operate.driver.incidents import with_evidence
from megascale.operate.show.curves import Curves
from megascale.operate.show.rank_states import RankStates
from megascale.operate.show.signs import STARTING, idle_limit_s


def standstill_of(states: RankStates, records: Mapping[int, FlightRecord], settings: FaultConfig, step_s: float) -> str:
    """Return why no rank makes progress, "" if one does; with the culprit if `records` has all ranks. `step_s`:
    `step_limit_s`.
    """
    limit_s = standstill_limit_s({rank.phase for rank in states.ranks}, settings, step_s)
    if not states.source or states.status is not None or states.stale or states.idle_s < limit_s:
        return ""
    text = f"no rank has made progress for {states.idle_s} s"
    if len(records) < len(states.ranks):
        return text
    finding = classify_hang(hang_verdict(records, process_states(records)), 0.0, {}, tuple(records), {})
    return with_evidence(f"{text}: {finding.what}", finding.evidence)


def step_limit_s(
    records: Collection[FlightRecord], settings: FaultConfig, curves: Curves, *, restarted: bool = False
) -> float:
    """Return the seconds without progress from which a rank in a step makes none. `records`: of ranks, as far as known.
    `restarted`: no step is known since a restart.

    The first step of a process, which compiles, connects and allocates, may take as long as a start: until a record or
    a logged step tells that one has ended.
    """
    step_s = max((record.step_time_s for record in records), default=0.0) or curves.last.get("step_time_s", 0.0)
    if records:
        has_stepped = any(record.step_time_s > 0 or 0 < record.first_step < record.step for record in records)
    else:
        has_stepped = bool(curves.last) and not restarted
    return max(idle_limit_s(step_s), 0.0 if has_stepped else settings.start_hang_s)


def standstill_limit_s(phases: Iterable[str], settings: FaultConfig, step_s: float) -> float:
    """Return the seconds without progress on any rank, with ranks in these phases, from which a job stands still.
    `step_s`: `step_limit_s`.
    """
    return max([step_s, *(_slow_phase_s(phase, settings) for phase in phases)])


def _slow_phase_s(phase: str, settings: FaultConfig) -> float:
    """Return the seconds that a phase other than a step may take without progress."""
    if phase == Phase.EVALUATION:
        return settings.evaluation_hang_s
    if phase == Phase.CHECKPOINT:
        return settings.checkpoint_hang_s
    return settings.start_hang_s if phase in (*STARTING, Phase.PROFILE) else 0.0
