"""MFU: where each second went, from the peak to the achieved MFU, beside the plan."""

from __future__ import annotations

from dash import Output, html

from megascale.operate.show.web.figures import WATERFALL_HEIGHT, empty_figure, waterfall_figure
from megascale.operate.show.web.page import Page, Runs, following, graph, note

KEY = "mfu"


def _layout() -> html.Div:
    return html.Div([graph("waterfall", WATERFALL_HEIGHT), html.Div(id="breakdown")])


def _show(runs: Runs, name: str) -> list:
    store = runs[name].store
    if store is None or store.breakdown is None:
        return [empty_figure(), note(runs[name].store_problem or "no step is complete yet")]
    return [waterfall_figure(store.breakdown), html.Pre(store.breakdown.to_text())]


OUTPUTS = (Output("waterfall", "figure"), Output("breakdown", "children"))
PAGE = Page(KEY, "MFU", _layout, following(KEY, OUTPUTS, _show))
