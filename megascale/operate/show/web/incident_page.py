"""Incidents: what happened to the job, what was done, and how long it took."""

from __future__ import annotations

from dash import Output, html

from megascale.core.units import format_duration, format_time
from megascale.operate.driver.incidents import Incident
from megascale.operate.show.web.page import Page, Runs, following, note, table

KEY = "incidents"
HEAD = (
    "", "time", "step", "class", "what happened", "culprit", "what was done", "recovered in", "steps lost", "evidence",
)  # fmt: skip
MOST = 500
"""Most incidents that are listed: the newest."""


def _layout() -> html.Div:
    return html.Div(id="incident-list")


def _show(runs: Runs, name: str) -> list:
    view = runs[name].view()
    incidents = view.incidents[::-1][:MOST]
    spikes = [
        f"step {spike.step}: {spike.metric} {spike.value:.4g}, recently {spike.recent:.4g}"
        for spike in view.curves.spikes
    ]
    found = table(HEAD, map(_row, incidents), "incident-table") if incidents else note("No incident is recorded.")
    more = [html.H2("Spikes"), html.Ul([html.Li(spike) for spike in spikes[-MOST:]])] if spikes else []
    return [[found, *more]]


def _row(incident: Incident) -> tuple[str, ...]:
    recovery = format_duration(incident.recovery_s) if incident.recovery_s is not None else ""
    return (
        str(incident.id), format_time(incident.since), str(incident.step),
        incident.class_, incident.what, str(incident.culprit), incident.action.reason, recovery,
        "" if incident.steps_lost is None else str(incident.steps_lost), "; ".join(incident.evidence),
    )  # fmt: skip


PAGE = Page(KEY, "Incidents", _layout, following(KEY, [Output("incident-list", "children")], _show))
