"""Timeline: chosen steps of a group's ranks, in the order of pipeline stages, replicas or tensor-parallel ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from urllib.parse import urlencode

from dash import Dash, Input, Output, dcc, html
from dash.exceptions import PreventUpdate
from flask import Flask, Response, abort, request

from megascale.layout.topology import Topology
from megascale.operate.show.chrome_trace import first_start, write_trace
from megascale.operate.show.step_events import events_of, opening_step, steps_with_events
from megascale.operate.show.web.figures import empty_figure
from megascale.operate.show.web.page import PICKED, RUN, TABS, Page, Runs, figure_of, graph, height_of, note
from megascale.operate.show.web.timeline_figure import timeline_figure

KEY = "timeline"
ORDERS = {"pp": "pipeline stages", "dp": "replicas", "tp": "tensor-parallel ranks", "all": "all ranks"}
MOST_RANKS, MOST_STEPS = 64, 5  # most ranks and steps of a timeline

DOWNLOAD = "/perfetto.json"


def _register(app: Dash, runs: Runs) -> None:
    @app.callback([Output("step", "options"), Output("step", "value")], [Input(RUN, "value"), Input(TABS, "value")])
    def offer_steps(name: str, tab: str) -> tuple[list[int], int | None]:
        if tab != KEY:
            raise PreventUpdate
        steps = steps_with_events(runs[name].folder)
        return steps[::-1], opening_step(runs[name].folder, steps)

    @app.callback(
        [*figure_of("timeline"), Output("timeline-note", "children"), Output("download", "href")],
        [
            Input(PICKED, "data"),
            Input("order", "value"),
            Input("step", "value"),
            Input("step-count", "value"),
            Input(RUN, "value"),
        ],
    )
    def update(rank: int, order: str, step: int | None, count: int, name: str) -> list:
        if step is None:
            return [empty_figure(), {}, note("no events of steps are recorded yet"), ""]
        view = runs[name].view()
        ranks = chosen_ranks(view.topology, rank, order)
        events = events_of(view.folder, ranks, range(step, step + count))
        span = f"steps {step} to {step + count - 1}" if count > 1 else f"step {step}"
        title = f"{span}, {ORDERS[order]}{f' of rank {rank}' if order != 'all' else ''}"
        query = urlencode({"run": name, "rank": rank, "order": order, "step": step, "count": count})
        link = f"{app.get_relative_path(DOWNLOAD)}?{query}"
        missing = [number for number in ranks if number not in {each.rank for each in events}]
        words = f"no events of {len(missing)} ranks in these steps" if missing else ""
        figure = timeline_figure(title, events)
        return [figure, height_of(figure), note(words), link]


def serve_download(server: Flask, runs: Runs) -> None:
    """Add the address of the file for Perfetto."""

    @server.get(DOWNLOAD)
    def download() -> Response:
        try:
            view = runs[request.args["run"]].view()
            rank, step, count = (int(request.args[name]) for name in ("rank", "step", "count"))
            ranks = chosen_ranks(view.topology, rank, request.args["order"])
        except (KeyError, ValueError, IndexError):
            abort(404)
        events = events_of(view.folder, ranks, range(step, step + min(count, MOST_STEPS)))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "timeline.json"
            write_trace(path, events, first_start(events))
            return Response(path.read_bytes(), mimetype="application/json")


def chosen_ranks(topology: Topology, rank: int, order: str) -> list[int]:
    """Return the ranks of a group of `rank` in order; MOST_RANKS at most. Raises: KeyError, IndexError"""
    if order == "all":
        return list(range(min(MOST_RANKS, topology.world_size)))
    axes = {"pp": ("pp",), "dp": ("cp", "dp"), "tp": ("tp",)}[order]
    return topology.group(min(max(rank, 0), topology.world_size - 1), *axes)[:MOST_RANKS]


CHOICES = [{"label": label, "value": key} for key, label in ORDERS.items()]
CONTROLS = [
    html.Label("order"),
    dcc.Dropdown(CHOICES, "pp", id="order", clearable=False, className="control"),
    html.Label("from step"),
    dcc.Dropdown([], None, id="step", clearable=False, className="control"),
    html.Label("steps"),
    dcc.Dropdown(list(range(1, MOST_STEPS + 1)), 1, id="step-count", clearable=False, className="control narrow"),
    html.A("file for Perfetto", id="download", href="", download="timeline.json"),
]
WORDS = note("The ranks of the picked rank's group. White gaps are bubbles.")
LAYOUT = html.Div([html.Div(CONTROLS, className="row"), WORDS, graph("timeline"), html.Div(id="timeline-note")])
PAGE = Page(KEY, "Timeline", LAYOUT, _register)
