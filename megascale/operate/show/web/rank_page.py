"""Ranks in 3D parallelism: pick a rank, and see its place, its groups, its neighbours, and what is known about it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dash import Dash, Input, Output, ctx, dcc, html
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from megascale.core.rank import format_ranks
from megascale.core.units import format_bytes, format_time
from megascale.operate.show.neighbours import RankPlace, place_in
from megascale.operate.show.rank_details import RankDetails, read_rank_details, read_rank_stack
from megascale.operate.show.run_view import RunView
from megascale.operate.show.signs import SIGNS
from megascale.operate.show.store_view import StoreView
from megascale.operate.show.web.page import (
    PAUSED,
    PICKED,
    RUN,
    TABS,
    TICK,
    Page,
    Runs,
    facts,
    graph,
    height_of,
    note,
    table,
)
from megascale.operate.show.web.place_figure import place_figure
from megascale.record.rank_state import RankState

KEY, PLACE = "ranks", "place"
SHOWN_EVENTS = 24  # events of the flight record that are listed: the newest


def _register(app: Dash, runs: Runs) -> None:
    @app.callback(Output("rank", "value"), Input(PICKED, "data"))
    def show_picked(rank: int) -> int:
        return rank

    @app.callback(
        Output(PICKED, "data"), [Input("rank", "value"), Input(PLACE, "clickData")], prevent_initial_call=True
    )
    def pick(number: int | None, clicked: dict | None) -> int:
        if ctx.triggered_id == PLACE and clicked is not None and "customdata" in clicked["points"][0]:
            return int(clicked["points"][0]["customdata"])
        if number is None:
            raise PreventUpdate
        return int(number)

    @app.callback(
        [Output(PLACE, "figure"), Output(PLACE, "style"), Output("rank-details", "children")],
        [Input(PICKED, "data"), Input(TICK, "n_intervals"), Input(RUN, "value"), Input(TABS, "value")],
        running=PAUSED,
    )
    def update(rank: int, tick: int | None, name: str, tab: str) -> list:
        if tab != KEY:
            raise PreventUpdate
        view, store = runs[name].view(), runs[name].store.latest
        rank = min(max(rank, 0), view.world - 1)
        letters = view.letters(store.marked if store is not None else ())
        place = place_in(view, rank)
        figure = place_figure(place, letters)
        details = _details(view, store, read_rank_details(view, rank), place, letters[rank])
        return [figure, height_of(figure), html.Div(list(details))]

    @app.callback(
        Output("rank-stack", "children"),
        [Input("read-stack", "n_clicks"), Input(PICKED, "data"), Input(RUN, "value")],
        prevent_initial_call=True,
    )
    def show_stack(clicks: int | None, rank: int, name: str) -> list:
        if ctx.triggered_id != "read-stack":
            return []  # another rank was picked
        view = runs[name].view()
        rank = min(max(rank, 0), view.world - 1)
        return [html.H2(f"Stack of rank {rank}"), html.Pre(read_rank_stack(view, rank))]


def _details(
    view: RunView, store: StoreView | None, details: RankDetails, place: RankPlace, letter: str
) -> Iterator[Component]:
    places = [
        *((axis, f"{index} of {size}") for axis, index, size in place.index),
        *((f"{axis} group", format_ranks(group, 12)) for axis, group in place.groups.items()),
        *((f"{flow.what} {flow.direction}", f"rank {flow.rank}") for flow in place.flows),
    ]
    yield html.Div(
        [
            html.Div([html.H2("Place"), facts(places)]),
            html.Div([html.H2("State"), facts(state_facts(view, store, details, letter))]),
        ],
        className="columns",
    )
    if details.incidents:
        yield html.H2("Incidents")
        yield html.Ul([html.Li(incident) for incident in details.incidents])
    if details.error:
        yield html.H2("Error")
        yield html.Pre(details.error)
    if (state := details.state) is not None:
        yield html.H2(f"Last events, from the {state.source}")
        yield _events(state)
        yield html.H2("Groups")
        groups = [
            (
                key, "" if each.ranks is None else str(len(each.ranks)),
                str(each.entered), str(each.issued), str(each.completed),
            )
            for key, each in state.groups.items()
        ]  # fmt: skip
        yield table(("group", "ranks", "entered", "issued", "completed"), groups)
    if details.output:
        yield html.H2(f"Output: {details.log}")
        yield html.Pre("\n".join(details.output))


def state_facts(view: RunView, store: StoreView | None, details: RankDetails, letter: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of what is known about a rank with a sign."""
    rank = details.rank
    yield "sign", f"{letter}  {SIGNS[letter].meaning}"
    if rank < len(view.states.ranks):
        status = view.states.ranks[rank]
        yield "phase", status.phase or "not begun"
        yield "step", f"{status.step:,}" if status.step > 0 else "none yet"
        yield "without progress", f"{int(status.idle_s)} s"
    if store is not None and rank < len(store.slowness):
        slowness, memory = float(store.slowness[rank]), float(store.memory[rank])
        yield "node", store.nodes[rank] or "unknown"
        yield "compute beside its peers", f"{slowness:+.1%}" if math.isfinite(slowness) else "unknown"
        yield "peak memory", format_bytes(memory) if math.isfinite(memory) else "unknown"
    if (record := details.state) is not None:
        yield "process", f"{record.pid}, attempt {record.attempt}"
        if record.wait is not None:
            place = f" {record.wait.sequence} of group {record.wait.group}" if record.wait.group else ""
            yield "waits", f"{record.wait.kind}{place}, for {(record.read_ns - record.wait.since_ns) / 1e9:.1f} s"
        for name, value in record.totals.items():
            text = f"{value:,.0f}" if value.is_integer() else f"{value:.6g}"
            yield name.replace("_", " "), format_time(value) if name.endswith("_time") else text


def _events(record: RankState) -> html.Table:
    rows = [
        (
            event.name, event.group, "" if event.sequence < 0 or not event.group else str(event.sequence),
            f"{event.part}{f' of layer {event.layer}' if event.layer >= 0 else ''}",
            "" if event.peer < 0 else str(event.peer), str(event.step or ""),
            "" if event.microbatch < 0 else str(event.microbatch), "" if event.chunk < 0 else str(event.chunk),
            format_bytes(event.bytes) if event.bytes else "",
            f"{(event.ended_ns - event.issued_ns) / 1e6:.3f} ms" if event.ended_ns else "in flight",
        )
        for event in record.last[-SHOWN_EVENTS:][::-1]
    ]  # fmt: skip
    head = ("operation", "group", "number", "tensor", "peer", "step", "micro-batch", "chunk", "bytes", "duration")
    return table(head, rows, "event-table")


NUMBER = dcc.Input(0, id="rank", type="number", min=0, step=1, debounce=True, className="control")
BUTTON = html.Button("stack of its process", id="read-stack")
CONTROLS = html.Div([html.Label("rank"), NUMBER, note("A click on a cell picks its rank."), BUTTON], className="row")
LAYOUT = html.Div([CONTROLS, graph(PLACE), html.Div(id="rank-stack"), html.Div(id="rank-details")])
PAGE = Page(KEY, "Ranks", LAYOUT, _register)
