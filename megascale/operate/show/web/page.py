"""Parts that pages share: their declaration, the ids of common controls, tables and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from dash import Dash, Input, Output, dcc, html
from dash.exceptions import PreventUpdate

from megascale.operate.show.web.runs import WatchedRun

RUN, TABS, TICK, NEWS, PICKED = "run", "tabs", "tick", "news", "picked"
"""Ids: the run's picker, the tabs, the clock, what the runs have said last, and the picked rank."""

PAUSED: Any = [(Output(TICK, "disabled"), True, False)]
"""The clock stands still while a page is made: an answer that takes longer than a tick would never be shown."""

GRAPH: Any = {"displayModeBar": False, "responsive": True, "doubleClick": "reset"}  # settings of every graph

Runs = dict[str, WatchedRun]


@dataclass(frozen=True)
class Page:
    """A page. `key`: of its tab; `register`: adds its callbacks."""

    key: str
    title: str
    layout: html.Div
    register: Callable[[Dash, Runs], None]


def following(
    key: str, outputs: Sequence[Output], show: Callable[..., list], *inputs: Input
) -> Callable[[Dash, Runs], None]:
    """Return what lets a page follow its run: while its tab is open, each piece of news changes its `outputs` to what
    `show` returns of the runs, the chosen run's name, and the values of `inputs`.
    """

    def register(app: Dash, runs: Runs) -> None:
        news = [Input(NEWS, "data"), Input(RUN, "value"), Input(TABS, "value")]

        @app.callback(list(outputs), [*news, *inputs], running=PAUSED)
        def update(news: str | None, name: str, tab: str, *values: Any) -> list:
            if tab != key:
                raise PreventUpdate
            return show(runs, name, *values)

    return register


def figure_of(name: str) -> list[Output]:
    """Return the outputs of a graph that has its figure's height: the figure, and `height_of` it."""
    return [Output(name, "figure"), Output(name, "style")]


def graph(name: str, height: int = 0) -> dcc.Graph:
    """Return an empty graph of `height` pixels, or of its figure's height by an output `style` with `height_of`."""
    return dcc.Graph(id=name, config=GRAPH, responsive=True, style={"height": f"{height}px"})


def height_of(figure: go.Figure) -> dict[str, str]:
    """Return the style of a graph with a figure: it fills the page's width, and has the figure's height."""
    return {"height": f"{figure.layout.height}px"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> html.Table:
    """Return a table. `name`: its id."""
    body = [html.Tr([html.Td(cell) for cell in row]) for row in rows]
    parts = [html.Thead(html.Tr([html.Th(cell) for cell in head])), html.Tbody(body)]
    return html.Table(parts, id=name) if name else html.Table(parts)


def facts(rows: Iterable[tuple[str, str]]) -> html.Table:
    """Return a table of names and values."""
    return html.Table([html.Tr([html.Th(name), html.Td(value)]) for name, value in rows], className="facts")


def note(text: str) -> html.P:
    """Return a remark, such as why there is nothing to show."""
    return html.P(text, className="note")
