"""Memory: the peak of each rank, and of each pipeline stage."""

from __future__ import annotations

import numpy as np
from dash import Output, html

from megascale.core.units import format_bytes
from megascale.layout.topology import Topology
from megascale.operate.show.rank_grid import rank_matrix
from megascale.operate.show.web.figures import empty_figure, memory_figure
from megascale.operate.show.web.page import Page, Runs, figure_of, following, graph, height_of, note, table

KEY = "memory"
HEAD = ("stage", "ranks", "least", "median", "most", "rank with the most")


def _layout() -> html.Div:
    return html.Div([graph("memory-map"), html.Div(id="memory-stages")])


def _show(runs: Runs, name: str) -> list:
    run = runs[name]
    if (store := run.store) is None:
        return [empty_figure(), {}, note(run.store_problem)]
    if not np.nansum(store.memory):
        return [empty_figure(), {}, note("the device does not tell its memory")]
    topology = run.view().topology
    figure = memory_figure(rank_matrix(topology), store.memory, store.nodes)
    return [figure, height_of(figure), table(HEAD, _stages(topology, store.memory), "stage-table")]


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


OUTPUTS = (*figure_of("memory-map"), Output("memory-stages", "children"))
PAGE = Page(KEY, "Memory", _layout, following(KEY, OUTPUTS, _show))
