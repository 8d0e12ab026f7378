"""Ranks in 3D parallelism: pick a rank, and see its place, its groups, its neighbours, and what is known about it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dash import Dash, Input, Output, ctx, dcc, html
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from megascale.core.rank import format_ranks
from megascale.core.units import format_bytes, format_time
from megascale.operate.driver.incidents import with_evidence
from megascale.operate.show.frame import letters_of
from megascale.operate.show.neighbours import RankPlace
from megascale.operate.show.rank_details import RankDetails, place_in, read_rank_details, read_rank_stack
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
from megascale.record.rank_state import FlightEvent, RankState

KEY, PLACE = "ranks", "place"
SHOWN_EVENTS = 24
"""Events of the flight record that are listed: the newest."""


def _layout() -> html.Div:
    number = dcc.Input(0, id="rank", type="number", min=0, step=1, debounce=True, className="control")
    button = html.Button("stack of its process", id="read-stack")
    controls = [html.Label("rank"), number, note("A click on a cell picks its rank."), button]
    return html.Div(
        [html.Div(controls, className="row"), graph(PLACE), html.Div(id="rank-stack"), html.Div(id="rank-details")]
    )


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
        view, store = runs[name].view(), runs[name].store
        rank = min(max(rank, 0), view.world - 1)
        details = read_rank_details(view, rank)
        letters = letters_of(view, store.slowness if store is not None else ())
        place = place_in(view, rank)
        figure = place_figure(place, letters)
        return [figure, height_of(figure), html.Div(list(_details(view, store, details, place, letters[rank])))]

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
    yield html.Div(
        [
            html.Div([html.H2("Place"), facts(_place(place))]),
            html.Div([html.H2("State"), facts(_state(view, store, details, letter))]),
        ],
        className="columns",
    )
    if details.incidents:
        yield html.H2("Incidents")
        yield html.Ul(
            [
                html.Li(with_evidence(f"incident {each.id}, step {each.step}: {each.what}", each.evidence))
                for each in details.incidents
            ]
        )
    if details.error:
        yield html.H2("Error")
        yield html.Pre(details.error)
    if details.state is not None:
        yield html.H2(f"Last events, from the {details.state.source}")
        yield _events(details.state)
        yield html.H2("Groups")
        yield _groups(details.state)
    if details.output:
        yield html.H2(f"Output: {details.log}")
        yield html.Pre("\n".join(details.output))


def _place(place: RankPlace) -> Iterator[tuple[str, str]]:
    for axis, index, size in place.index:
        yield axis, f"{index} of {size}"
    for axis, group in place.groups.items():
        yield f"{axis} group", format_ranks(group, 12)
    for flow in place.flows:
        yield f"{flow.what} {flow.direction}", f"rank {flow.rank}"


def _state(view: RunView, store: StoreView | None, details: RankDetails, letter: str) -> Iterator[tuple[str, str]]:
    rank = details.rank
    yield "sign", f"{letter}  {SIGNS[letter].meaning}"
    if rank < len(view.states.ranks):
        state = view.states.ranks[rank]
        yield "phase", state.phase or "not begun"
        yield "step", f"{state.step:,}" if state.step > 0 else "none yet"
        yield "without progress", f"{int(state.idle_s)} s"
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
        yield from ((name.replace("_", " "), _total(name, value)) for name, value in record.totals.items())


def _total(name: str, value: float) -> str:
    if name.endswith("_time"):
        return format_time(value)
    return f"{value:,.0f}" if value.is_integer() else f"{value:.6g}"


def _events(record: RankState) -> html.Table:
    head = ("operation", "group", "number", "tensor", "peer", "step", "micro-batch", "chunk", "bytes", "duration")
    return table(head, map(_event, record.last[-SHOWN_EVENTS:][::-1]), "event-table")


def _event(event: FlightEvent) -> Sequence[str]:
    duration = f"{(event.ended_ns - event.issued_ns) / 1e6:.3f} ms" if event.ended_ns else "in flight"
    layer = f" of layer {event.layer}" if event.layer >= 0 else ""
    return (
        event.name, event.group, "" if event.sequence < 0 or not event.group else str(event.sequence),
        f"{event.part}{layer}", "" if event.peer < 0 else str(event.peer), str(event.step or ""),
        "" if event.microbatch < 0 else str(event.microbatch), "" if event.chunk < 0 else str(event.chunk),
        format_bytes(event.bytes) if event.bytes else "", duration,
    )  # fmt: skip


def _groups(record: RankState) -> html.Table:
    rows = [
        (
            key,
            str(len(state.ranks)) if state.ranks is not None else "",
            *map(str, (state.entered, state.issued, state.completed)),
        )
        for key, state in record.groups.items()
    ]
    return table(("group", "ranks", "entered", "issued", "completed"), rows)


PAGE = Page(KEY, "Ranks", _layout, _register)
