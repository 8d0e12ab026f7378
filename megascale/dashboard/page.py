"""Parts that pages share: their declaration, the ids of common controls, tables and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dash import Dash, dcc, html

from megascale.dashboard.runs import WatchedRun

RUN, TABS, TICK, PICKED = "run", "tabs", "tick", "picked"
"""Ids: the run's picker, the tabs, the clock that lets pages follow their run, and the picked rank."""

GRAPH = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"]}
"""Settings of every graph."""

Runs = dict[str, WatchedRun]


@dataclass(frozen=True)
class Page:
    """A page. `key`: of its tab; `layout`: makes its content; `register`: adds its callbacks."""

    key: str
    title: str
    layout: Callable[[], html.Div]
    register: Callable[[Dash, Runs], None]


def graph(name: str) -> dcc.Graph:
    """Return an empty graph, without the controls that nobody needs."""
    return dcc.Graph(id=name, config=GRAPH, className="graph")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], name: str = "") -> html.Table:
    """Return a table. `name`: its id."""
    body = [html.Tr([html.Td(cell) for cell in row]) for row in rows]
    parts = [html.Thead(html.Tr([html.Th(cell) for cell in head])), html.Tbody(body)]
    return html.Table(parts, id=name) if name else html.Table(parts)


def facts(rows: Iterable[tuple[str, object]]) -> html.Table:
    """Return a table of names and values."""
    return html.Table([html.Tr([html.Th(name), html.Td(value)]) for name, value in rows], className="facts")


def note(text: str) -> html.P:
    """Return a remark, such as why there is nothing to show."""
    return html.P(text, className="note")
