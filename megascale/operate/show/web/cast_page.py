"""Casts: a statistic of every FP8 operand over the newest logged steps, and the sharpness of logits."""

from __future__ import annotations

from dash import Input, Output, dcc, html

from megascale.operate.show.curves import CastRecords
from megascale.operate.show.web.figures import cast_figure, empty_figure, sharpness_figure
from megascale.operate.show.web.page import Page, Runs, figure_of, following, graph, height_of, note, table

MAP, STATISTIC, SHARPNESS = "cast-map", "cast-statistic", "sharpness"
STATISTICS = ("kurtosis", "saturated", "underflow", "rms", "amax")
MOST = 20  # operands in the table


def _show(runs: Runs, name: str, statistic: str) -> list:
    curves = runs[name].view().curves
    sharpness = sharpness_figure(curves.sharpness) if curves.sharpness else empty_figure()
    below = [sharpness, height_of(sharpness) if curves.sharpness else {}]
    if not curves.casts:
        return [empty_figure(), {}, note("the run has no statistics of FP8 casts"), *below]
    figure = cast_figure(curves.casts, statistic)
    return [
        figure,
        height_of(figure),
        table(("operand", *STATISTICS), rows(curves.casts, statistic), "cast-table"),
        *below,
    ]


def rows(casts: CastRecords, statistic: str) -> list[tuple[str, ...]]:
    """Return the newest statistics of the operands with the largest one."""
    _, newest = casts[-1]
    largest = sorted(newest, key=lambda name: -newest[name].get(statistic, 0.0))[:MOST]
    return [(name, *(f"{newest[name].get(kind, float('nan')):.3g}" for kind in STATISTICS)) for name in largest]


PICKER = dcc.Dropdown([*STATISTICS], STATISTICS[0], id=STATISTIC, clearable=False, className="control")
CONTROLS = html.Div([html.Label("statistic"), PICKER], className="row")
LAYOUT = html.Div([CONTROLS, graph(MAP), html.Div(id="cast-operands"), graph(SHARPNESS)])
OUTPUTS = (*figure_of(MAP), Output("cast-operands", "children"), *figure_of(SHARPNESS))
PAGE = Page("casts", "Casts", LAYOUT, following("casts", OUTPUTS, _show, Input(STATISTIC, "value")))
