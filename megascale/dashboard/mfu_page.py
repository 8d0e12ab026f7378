"""MFU: where each second went, from the peak to the achieved MFU, beside the plan."""

from __future__ import annotations

import plotly.graph_objects as go
from dash import Dash, Input, Output, html
from dash.exceptions import PreventUpdate

from megascale.dashboard.figures import waterfall_figure
from megascale.dashboard.page import RUN, TABS, TICK, Page, Runs, graph, note

KEY = "mfu"


def _layout() -> html.Div:
    return html.Div([graph("waterfall"), html.Div(id="ledger")])


def _register(app: Dash, runs: Runs) -> None:
    @app.callback(
        [Output("waterfall", "figure"), Output("ledger", "children")],
        [Input(TICK, "n_intervals"), Input(RUN, "value"), Input(TABS, "value")],
    )
    def update(tick: int | None, name: str, tab: str) -> list:
        if tab != KEY:
            raise PreventUpdate
        store = runs[name].store
        if store is None or store.ledger is None:
            return [go.Figure(), note(runs[name].store_problem or "no step is complete yet")]
        return [waterfall_figure(store.ledger), html.Pre(store.ledger.to_text())]


PAGE = Page(KEY, "MFU", _layout, _register)
