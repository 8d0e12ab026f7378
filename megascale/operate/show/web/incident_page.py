"""Incidents: what happened to the job, what was done, and how long it took."""

from __future__ import annotations

from dash import Output, html

from megascale.core.units import format_duration, format_time
from megascale.operate.show.web.page import Page, Runs, following, note, table

HEAD = (
    "", "time", "step", "class", "what happened", "culprit", "what was done", "recovered in", "steps lost", "evidence",
)  # fmt: skip
MOST = 500  # most incidents that are listed: the newest


def _show(runs: Runs, name: str) -> list:
    view = runs[name].view()
    rows = [
        (
            str(each.id), format_time(each.since), str(each.step), each.class_, each.what, str(each.culprit),
            each.action.reason, "" if each.recovery_s is None else format_duration(each.recovery_s),
            "" if each.steps_lost is None else str(each.steps_lost), "; ".join(each.evidence),
        )
        for each in view.incidents[::-1][:MOST]
    ]  # fmt: skip
    alerts = [
        f"step {each.step}: {each.alert} {each.value:.4g}, recently {each.recent:.4g}" for each in view.curves.alerts
    ]
    found = table(HEAD, rows, "incident-table") if rows else note("No incident is recorded.")
    more = [html.H2("Alerts"), html.Ul([html.Li(alert) for alert in alerts[-MOST:]])] if alerts else []
    return [[found, *more]]


LAYOUT = html.Div(id="incident-list")
PAGE = Page("incidents", "Incidents", LAYOUT, following("incidents", [Output("incident-list", "children")], _show))
