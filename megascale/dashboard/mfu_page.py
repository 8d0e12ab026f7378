"""MFU: where each second went, from the peak to the achieved MFU, beside the plan."""

from __future__ import annotations

from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate

from megascale.dashboard.figures import WATERFALL_HEIGHT, empty_figure, waterfall_figure
from megascale.dashboard.page import RUN, TABS, TICK, Page, Runs, changed, graph, note

KEY, SHOWN = "mfu", "mfu-shown"


def _layout() -> html.Div:
    return html.Div([graph("waterfall", WATERFALL_HEIGHT), html.Div(id="breakdown"), dcc.Store(SHOWN)])


def _register(app: Dash, runs: Runs) -> None:
    @app.callback(
        [Output("waterfall", "figure"), Output("breakdown", "children"), Output(SHOWN, "data")],
        [Input(TICK, "n_intervals"), Input(RUN, "value"), Input(TABS, "value")],
        State(SHOWN, "data"),
    )
    def update(tick: int | None, name: str, tab: str, shown: str | None) -> list:
        if tab != KEY:
            raise PreventUpdate
        shown, store = changed(runs[name].store_version, shown), runs[name].store
        if store is None or store.breakdown is None:
            return [empty_figure(), note(runs[name].store_problem or "no step is complete yet"), shown]
        return [waterfall_figure(store.breakdown), html.Pre(store.breakdown.to_text()), shown]


PAGE = Page(KEY, "MFU", _layout, _register)
