"""Heat maps. Of ranks: each rank's time beside its peers' of the same stage, in all of its compute or in one part of a
step; and the peak of its memory. A click on a cell picks the rank. Also a heat map of experts by layer.
"""

from __future__ import annotations

import numpy as np
from dash import Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.exceptions import PreventUpdate

from megascale.core.rank import format_ranks
from megascale.core.units import format_bytes
from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow.expert_loads import LOAD_HEAD
from megascale.operate.diagnose.slow.heatmap import MIN_SHARE, HeatMap
from megascale.operate.show.rank_grid import rank_matrix
from megascale.operate.show.store_view import StoreView
from megascale.operate.show.web.figures import empty_figure, excess_figure, expert_figure, memory_figure
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

MAP, PART, MEMORY_MAP, EXPERT_MAP = "heat-map", "heat-part", "memory-map", "expert-map"
COMPUTE = "all compute"


def _show_heat(runs: Runs, name: str, part: str) -> list:
    run = runs[name]
    if (store := run.store.latest) is None:
        return [empty_figure(), {}, no_update, note(run.store.problem)]
    heat = store.heat
    matrix = rank_matrix(run.view().topology)
    title = f"{part}: each rank beside its peers, steps {heat.first_step} to {heat.last_step}"
    figure = excess_figure(title, matrix, part_excess(store, part), store.nodes)
    hosts = html.Div(note("The event store has no metrics of hosts."))
    if store.hosts is not None:
        hosts = html.Div([html.H2("Hosts by their metrics"), html.Pre(str(store.hosts), id="hosts")])
    return [figure, height_of(figure), [COMPUTE, *long_parts(heat)], [_outliers(heat), hosts]]


def _show_memory(runs: Runs, name: str) -> list:
    run = runs[name]
    if (store := run.store.latest) is None:
        return [empty_figure(), {}, note(run.store.problem)]
    if not np.nansum(store.memory):
        return [empty_figure(), {}, note("the device does not tell its memory")]
    topology = run.view().topology
    figure = memory_figure(rank_matrix(topology), store.memory, store.nodes)
    head = ("stage", "ranks", "least", "median", "most", "rank with the most")
    return [figure, height_of(figure), table(head, _stages(topology, store.memory), "stage-table")]


def _show_experts(runs: Runs, name: str) -> list:
    run = runs[name]
    if (store := run.store.latest) is None:
        return [empty_figure(), {}, note(run.store.problem)]
    if not len((found := store.experts).steps):
        return [empty_figure(), {}, note("the event store has no loads of experts")]
    figure = expert_figure(found)
    return [figure, height_of(figure), table(LOAD_HEAD, found.rows, "expert-table")]


def _stages(topology: Topology, memory: np.ndarray) -> list[tuple[str, ...]]:
    """Return a row of the table for each pipeline stage with known ranks."""
    rows = []
    each = topology.world_size // topology.pp
    for stage in range(topology.pp):
        found = memory[stage * each : (stage + 1) * each]
        if np.isfinite(found).any():
            values = (np.nanmin(found), np.nanmedian(found), np.nanmax(found))
            most = stage * each + int(np.nanargmax(found))
            rows.append((f"pp {stage}", str(each), *(format_bytes(float(value)) for value in values), str(most)))
    return rows


def _register(app: Dash, runs: Runs) -> None:
    outputs = (*figure_of(MAP), Output(PART, "options"), Output("outliers", "children"))
    following("heat", outputs, _show_heat, Input(PART, "value"))(app, runs)

    @app.callback(
        [Output(PICKED, "data", allow_duplicate=True), Output(TABS, "value", allow_duplicate=True)],
        [Input(MAP, "clickData"), Input(MEMORY_MAP, "clickData")],
        State(RUN, "value"),
        prevent_initial_call=True,
    )
    def pick(on_heat: dict | None, on_memory: dict | None, name: str) -> tuple[int, str]:
        clicked = on_memory if ctx.triggered_id == MEMORY_MAP else on_heat
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


def _outliers(heat: HeatMap) -> html.Div:
    if not heat.outliers:
        return html.Div(note("No rank and no node is slower than its peers for long."))
    rows = [
        (
            str(each.culprit), each.kind, format_ranks(each.culprit.ranks),
            f"{each.ratio - 1:+.1%}" if each.peer_s else "peers: 0 s",
            ", ".join(f"{name} {1e3 * seconds:+.3g} ms" for name, seconds in each.parts), f"{1e3 * each.cost_s:.3g} ms",
        )
        for each in heat.outliers
    ]  # fmt: skip
    head = ("outlier", "kind", "ranks", "beside its peers", "longer parts", "costs the job in a step")
    return html.Div(table(head, rows, "outlier-table"))


PARTS = dcc.Dropdown([COMPUTE], COMPUTE, id=PART, clearable=False, className="control")
CONTROLS = [html.Label("part of a step"), PARTS, note("Click on a cell to see the rank.")]
LAYOUT = html.Div([html.Div(CONTROLS, className="row"), graph(MAP), html.Div(id="outliers")])
HEAT_PAGE = Page("heat", "Heat map", LAYOUT, _register)

MEMORY_OUTPUTS = (*figure_of(MEMORY_MAP), Output("memory-stages", "children"))
MEMORY_LAYOUT = html.Div([graph(MEMORY_MAP), html.Div(id="memory-stages")])
MEMORY_PAGE = Page("memory", "Memory", MEMORY_LAYOUT, following("memory", MEMORY_OUTPUTS, _show_memory))

EXPERT_OUTPUTS = (*figure_of(EXPERT_MAP), Output("expert-layers", "children"))
EXPERT_LAYOUT = html.Div([graph(EXPERT_MAP), html.Div(id="expert-layers")])
EXPERT_PAGE = Page("experts", "Experts", EXPERT_LAYOUT, following("experts", EXPERT_OUTPUTS, _show_experts))
