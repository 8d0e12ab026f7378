"""Overview: the verdict, the curves of all runs, and their last values side by side."""

from __future__ import annotations

import math

from dash import Output, html
from dash.development.base_component import Component

from megascale.core.units import format_count, format_duration
from megascale.operate.show.frame import is_ill, verdict_of
from megascale.operate.show.run_view import RunView
from megascale.operate.show.web.figures import CURVE_HEIGHT, CURVES, curve_figure
from megascale.operate.show.web.page import Page, Runs, following, graph, note, table

KEY = "overview"
HEAD = ("run", "state", "step", "loss", "gradient norm", "tokens/s", "MFU", "step time", "left")


def _layout() -> html.Div:
    graphs = html.Div([graph(f"curve-{metric}", CURVE_HEIGHT) for metric in CURVES], className="curves")
    return html.Div([html.Div(id="verdict"), html.Div(id="runs"), graphs])


def _show(runs: Runs, name: str) -> list:
    views = {key: run.view() for key, run in runs.items()}
    rows = [_row(key, view) for key, view in views.items()]
    figures = (curve_figure(metric, views) for metric in CURVES)
    return [_verdict(runs, name), table(HEAD, rows, "values"), *figures]


def _verdict(runs: Runs, name: str) -> html.Div:
    view, store = runs[name].view(), runs[name].store
    findings = store.verdicts if store is not None else None
    tone = "bad" if is_ill(view, findings) else view.tone
    lines: list[Component] = [html.P(verdict_of(view, findings), className=f"verdict {tone}")]
    if findings and len(findings) > 1:
        lines.append(html.Ul([html.Li(finding) for finding in findings[1:]]))
    lines += [note(text) for text in (runs[name].store_problem, *(store.notes if store is not None else ())) if text]
    return html.Div(lines)


def _row(name: str, view: RunView) -> tuple[str, ...]:
    last = view.curves.last
    if not last:
        return (name, view.state, f"{view.step:,}", *[""] * 6)
    left_s = (view.steps - view.step) * view.step_time_s
    mfu = f"{last['mfu_full']:.1%}" if math.isfinite(last["mfu_full"]) else "n/a"
    return (
        name, view.state, f"{view.step:,}", f"{last['loss']:.4f}", f"{last['grad_norm']:.3g}",
        format_count(last["tokens_per_s"]), mfu, f"{view.step_time_s:.4g} s",
        format_duration(left_s) if view.is_live and view.steps else "",
    )  # fmt: skip


OUTPUTS = (
    Output("verdict", "children"), Output("runs", "children"),
    *(Output(f"curve-{metric}", "figure") for metric in CURVES),
)  # fmt: skip
PAGE = Page(KEY, "Overview", _layout, following(KEY, OUTPUTS, _show))
