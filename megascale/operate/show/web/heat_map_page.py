"""Heat map: each rank's time beside its peers' of the same stage, in all of its compute or in one part of a step."""

from __future__ import annotations

import numpy as np
from dash import Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.exceptions import PreventUpdate

from megascale.core.rank import format_ranks
from megascale.operate.diagnose.slow.heatmap import MIN_SHARE, HeatMap
from megascale.operate.show.rank_grid import rank_matrix
from megascale.operate.show.store_view import StoreView
from megascale.operate.show.web.figures import empty_figure, excess_figure
from megascale.operate.show.web.page import (
    PICKED,
    RUN,
    TABS,
    Page,
    Runs,
    figure_of,
    following,
    graph,
    height_of,
    note,
    table,
)

KEY, MAP, PART = "heat", "heat-map", "heat-part"
COMPUTE = "all compute"


def _layout() -> html.Div:
    part = dcc.Dropdown([COMPUTE], COMPUTE, id=PART, clearable=False, className="control")
    words = "Click on a cell to see the rank."
    return html.Div(
        [
            html.Div([html.Label("part of a step"), part, note(words)], className="row"),
            graph(MAP),
            html.Div(id="outliers"),
        ]
    )


def _show(runs: Runs, name: str, part: str) -> list:
    run = runs[name]
    if (store := run.store) is None:
        return [empty_figure(), {}, no_update, note(run.store_problem)]
    heat = store.heat
    matrix = rank_matrix(run.view().topology)
    title = f"{part}: each rank beside its peers, steps {heat.first_step} to {heat.last_step}"
    figure = excess_figure(title, matrix, part_excess(store, part), store.nodes)
    return [figure, height_of(figure), [COMPUTE, *long_parts(heat)], [_outliers(store), _hosts(store)]]


def _register(app: Dash, runs: Runs) -> None:
    outputs = (*figure_of(MAP), Output(PART, "options"), Output("outliers", "children"))
    following(KEY, outputs, _show, Input(PART, "value"))(app, runs)

    @app.callback(
        [Output(PICKED, "data", allow_duplicate=True), Output(TABS, "value", allow_duplicate=True)],
        [Input(MAP, "clickData"), Input("memory-map", "clickData")],
        State(RUN, "value"),
        prevent_initial_call=True,
    )
    def pick(on_heat: dict | None, on_memory: dict | None, name: str) -> tuple[int, str]:
        clicked = on_memory if ctx.triggered_id == "memory-map" else on_heat
        if clicked is None:
            raise PreventUpdate
        cell = clicked["points"][0]  # a heat map's axes count columns and rows from 0
        return int(rank_matrix(runs[name].view().topology).ranks[cell["y"], cell["x"]]), "ranks"


def long_parts(heat: HeatMap) -> list[str]:
    """Return the parts that take at least MIN_SHARE of a step on some rank: others make no step slow."""
    longest = np.fmax.reduce(heat.seconds, 0, initial=0.0)
    return [name for name, seconds in zip(heat.columns, longest, strict=True) if seconds >= MIN_SHARE * heat.step_s]


def part_excess(store: StoreView, part: str) -> np.ndarray:
    """Return each rank's excess over its peers in a part of a step, 0 for less than MIN_SHARE of the step; NaN for a
    rank without ordinary steps.
    """
    heat = store.heat
    if part not in heat.columns:
        return store.slowness
    excess = np.full(len(store.slowness), np.nan)
    at = heat.columns.index(part)
    is_small = heat.seconds[:, at] - heat.peer_s[:, at] < MIN_SHARE * heat.step_s
    excess[heat.ranks] = np.where(is_small, 0.0, heat.ratio[:, at] - 1)
    return excess


def _outliers(store: StoreView) -> html.Div:
    if not store.heat.outliers:
        return html.Div(note("No rank and no node is slower than its peers for long."))
    rows = [
        (
            str(each.culprit), each.kind, format_ranks(each.culprit.ranks),
            f"{each.ratio - 1:+.1%}" if each.peer_s else "peers: 0 s",
            ", ".join(f"{name} {1e3 * seconds:+.3g} ms" for name, seconds in each.parts), f"{1e3 * each.cost_s:.3g} ms",
        )
        for each in store.heat.outliers
    ]  # fmt: skip
    head = ("outlier", "kind", "ranks", "beside its peers", "longer parts", "costs the job in a step")
    return html.Div(table(head, rows, "outlier-table"))


def _hosts(store: StoreView) -> html.Div:
    if store.hosts is None:
        return html.Div(note("The event store has no metrics of hosts."))
    return html.Div([html.H2("Hosts by their metrics"), html.Pre(str(store.hosts), id="hosts")])


PAGE = Page(KEY, "Heat map", _layout, _register)
