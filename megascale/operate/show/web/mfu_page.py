"""MFU: where each second went, from the peak to the achieved MFU, beside the plan."""

from __future__ import annotations

from dash import Output, html

from megascale.operate.show.web.figures import WATERFALL_HEIGHT, empty_figure, waterfall_figure
from megascale.operate.show.web.page import Page, Runs, following, graph, note


def _show(runs: Runs, name: str) -> list:
    store = runs[name].store.latest
    if store is None or store.breakdown is None:
        return [empty_figure(), note(runs[name].store.problem or "no step is complete yet")]
    return [waterfall_figure(store.breakdown), html.Pre(store.breakdown.to_text())]


OUTPUTS = (Output("waterfall", "figure"), Output("breakdown", "children"))
LAYOUT = html.Div([graph("waterfall", WATERFALL_HEIGHT), html.Div(id="breakdown")])
PAGE = Page("mfu", "MFU", LAYOUT, following("mfu", OUTPUTS, _show))
