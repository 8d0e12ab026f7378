"""Overview: the verdict, the curves of all runs, and their last values side by side."""

from __future__ import annotations

from dash import Output, html
from dash.development.base_component import Component

from megascale.core.units import format_duration
from megascale.operate.show.curves import CURVES
from megascale.operate.show.run_view import RunView
from megascale.operate.show.web.figures import CURVE_HEIGHT, curve_figure
from megascale.operate.show.web.page import Page, Runs, following, graph, note, table

HEAD = ("run", "state", "step", "loss", "gradient norm", "tokens/s", "MFU full", "step time", "left")


def _show(runs: Runs, name: str) -> list:
    views = {key: run.view() for key, run in runs.items()}
    view, store = views[name], runs[name].store.latest
    findings = store.verdicts if store is not None else None
    tone = "bad" if view.is_ill(findings) else view.tone
    lines: list[Component] = [html.P(view.verdict(findings), className=f"verdict {tone}")]
    if findings and len(findings) > 1:
        lines.append(html.Ul([html.Li(finding) for finding in findings[1:]]))
    lines += [note(text) for text in (runs[name].store.problem, *(store.notes if store is not None else ())) if text]
    rows = [_row(key, view) for key, view in views.items()]
    figures = (curve_figure(metric, views) for metric in CURVES)
    return [html.Div(lines), table(HEAD, rows, "values"), *figures]


def _row(name: str, view: RunView) -> tuple[str, ...]:
    last = view.curves.last
    if not last:
        return (name, view.state, f"{view.step:,}", *[""] * 6)
    values = (kind.value(last[metric]) for metric, kind in CURVES.items())
    left = format_duration(view.left_s) if view.is_live and view.steps else ""
    return (name, view.state, f"{view.step:,}", *values, f"{view.step_time_s:.4g} s", left)


OUTPUTS = (
    Output("verdict", "children"), Output("runs", "children"),
    *(Output(f"curve-{metric}", "figure") for metric in CURVES),
)  # fmt: skip
GRAPHS = html.Div([graph(f"curve-{metric}", CURVE_HEIGHT) for metric in CURVES], className="curves")
LAYOUT = html.Div([html.Div(id="verdict"), html.Div(id="runs"), GRAPHS])
PAGE = Page("overview", "Overview", LAYOUT, following("overview", OUTPUTS, _show))
