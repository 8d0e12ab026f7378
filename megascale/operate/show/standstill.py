"""How long ranks may make no progress, and why they make none."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from megascale.config.fault import FaultConfig
from megascale.operate.diagnose.hang.hang import hang_verdict
from megascale.operate.driver.classify import classify_hang
from megascale.operate.driver.incidents import with_evidence
from megascale.operate.driver.watch import phase_bounds
from megascale.operate.show.run_view import RunView
from megascale.operate.show.signs import IDLE_S, idle_limit_s
from megascale.record.layout import Phase
from megascale.record.log_files import local_states, process_states
from megascale.record.rank_state import RankState


def with_standstill(view: RunView) -> RunView:
    """Return a run's model with why no rank makes progress: with the culprit if all ranks are on this host."""
    states = view.states
    idle = any(rank.idle_s >= IDLE_S for rank in states.ranks)  # else no limit is reached
    records = local_states(view.folder) if idle and states.source else {}
    view = replace(view, step_limit_s=step_limit_s(records.values(), view, restarted=bool(view.history.open)))
    limit_s = standstill_limit_s({rank.phase for rank in states.ranks}, view, view.step_limit_s)
    if not states.source or states.status is not None or states.stale or states.idle_s < limit_s:
        return view
    text = f"no rank has made progress for {states.idle_s} s"
    if len(records) >= len(states.ranks):
        finding = classify_hang(hang_verdict(records, process_states(records)), 0.0, {}, tuple(records), {})
        text = with_evidence(f"{text}: {finding.what}", finding.evidence)
    return replace(view, standstill=text)


def step_limit_s(records: Collection[RankState], view: RunView, *, restarted: bool = False) -> float:
    """Return the seconds without progress from which a rank in a step makes none. `records`: of ranks, as far as known.
    `restarted`: no step is known since a restart.

    The first step of a process, which compiles, connects and allocates, may take as long as a start: until a record or
    a logged step tells that one has ended.
    """
    step_s = max((record.step_time_s for record in records), default=0.0) or view.curves.last.get("step_time_s", 0.0)
    if records:
        has_stepped = any(record.step_time_s > 0 or 0 < record.first_step < record.step for record in records)
    else:
        has_stepped = bool(view.curves.last) and not restarted
    return max(idle_limit_s(step_s), 0.0 if has_stepped else _settings(view).start_hang_s)


def standstill_limit_s(phases: Iterable[str], view: RunView, step_s: float) -> float:
    """Return the seconds without progress on any rank, with ranks in these phases, from which a job stands still.
    `step_s`: `step_limit_s`.
    """
    bounds = phase_bounds(_settings(view), view.config.sites_hang_s if view.config is not None else math.inf)
    return max([step_s, *(bounds.get(phase, 0.0) for phase in phases if phase not in ("", Phase.DONE))])


def _settings(view: RunView) -> FaultConfig:
    return view.config.fault if view.config is not None else FaultConfig()
