"""MFU: where each second went, from the peak to the achieved MFU, beside the plan."""

from __future__ import annotations

from dash import Dash, Input, Output, html
from dash.exceptions import PreventUpdate

from megascale.operate.show.web.figures import WATERFALL_HEIGHT, empty_figure, waterfall_figure
from megascale.operate.show.web.page import NEWS, PAUSED, RUN, TABS, Page, Runs, graph, note

KEY = "mfu"


def _layout() -> html.Div:
    return html.Div([graph("waterfall", WATERFALL_HEIGHT), html.Div(id="breakdown")])


def _register(app: Dash, runs: Runs) -> None:
    @app.callback(
        [Output("waterfall", "figure"), Output("breakdown", "children")],
        [Input(NEWS, "data"), Input(RUN, "value"), Input(TABS, "value")],
        running=PAUSED,
    )
    def update(news: str | None, name: str, tab: str) -> list:
        if tab != KEY:
            raise PreventUpdate
        store = runs[name].store
        if store is None or store.breakdown is None:
            return [empty_figure(), note(runs[name].store_problem or "no step is complete yet")]
        return [waterfall_figure(store.breakdown), html.Pre(store.breakdown.to_text())]


PAGE = Page(KEY, "MFU", _layout, _register)
