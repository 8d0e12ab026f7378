"""The Dash application: a header, a tab for each page, and a tick that lets the visible page follow its run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dash import Dash, Input, Output, State, dcc, html, no_update
from flask import Flask

from megascale.operate.show.web import (
    cast_page,
    heat_map_pages,
    incident_page,
    mfu_page,
    overview_page,
    rank_page,
    timeline_page,
)
from megascale.operate.show.web.page import NEWS, PAUSED, PICKED, RUN, TABS, TICK, Page
from megascale.operate.show.web.runs import WatchedRun
from megascale.operate.show.web.token_gate import protect

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

TICK_S = 2.0  # seconds between two looks at the runs

PAGES: tuple[Page, ...] = (
    overview_page.PAGE, heat_map_pages.HEAT_PAGE, rank_page.PAGE, timeline_page.PAGE, mfu_page.PAGE,
    heat_map_pages.MEMORY_PAGE, heat_map_pages.EXPERT_PAGE, cast_page.PAGE, incident_page.PAGE,
)  # fmt: skip


def make_app(runs: dict[str, WatchedRun], token: str, cookie: str = "megascale-dashboard", base: str = "/") -> Dash:
    """Return the application of runs, behind a token. `base`: path of its pages for the browser, from / to /."""
    server = Flask("megascale.operate.show.web")
    protect(server, token, cookie, base)
    server.wsgi_app = below(base, server.wsgi_app)  # type: ignore[assignment,method-assign]  # as Flask advises
    app = Dash(
        "megascale.operate.show.web",
        server=server,  # type: ignore[arg-type]  # takes a Flask application, whatever its type says
        assets_folder=str(Path(__file__).parent / "assets"),
        serve_locally=True,
        routes_pathname_prefix="/",
        requests_pathname_prefix=base,
        title=", ".join(runs),
        update_title="",
    )
    names = list(runs)
    picker = dcc.Dropdown(names, names[0], id=RUN, clearable=False, searchable=False, className="run")
    tabs = [dcc.Tab(page.layout, label=page.title, value=page.key, className="tab") for page in PAGES]
    app.layout = html.Div(
        [
            html.Header([html.Div(id="header"), html.Div(picker, hidden=len(names) == 1)]),
            dcc.Tabs(tabs, id=TABS, value=PAGES[0].key),
            dcc.Interval(TICK, interval=TICK_S * 1000),
            dcc.Store(NEWS),
            dcc.Store(PICKED, data=0),
        ]
    )
    _follow(app, runs)
    for page in PAGES:
        page.register(app, runs)
    timeline_page.serve_download(server, runs)
    return app


def below(base: str, app: WSGIApplication) -> WSGIApplication:
    """Return the application for requests of paths below `base`, which some proxies keep and others strip."""

    def handle(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if f"{path}/".startswith(base):
            environ["PATH_INFO"] = f"/{path[len(base) :]}"
        return app(environ, start_response)

    return handle


def _follow(app: Dash, runs: dict[str, WatchedRun]) -> None:
    """Keep the header up to date, and let the visible page know when there is something new."""
    outputs = [Output("header", "children"), Output(NEWS, "data")]
    inputs = [Input(TICK, "n_intervals"), Input(RUN, "value")]

    @app.callback(outputs, inputs, State(NEWS, "data"), running=PAUSED)
    def update(tick: int | None, name: str, before: str | None) -> list:
        view, problem = runs[name].view(), runs[name].problem
        words = f"step {view.progress} \u00b7 attempt {view.attempt} \u00b7 {view.layout}"
        state = html.Span(view.state, className=f"state {view.tone}")
        news = str([run.news for run in runs.values()])
        parts = [
            html.H1(name),
            state,
            html.Span(words, className="words"),
            html.Span(runs[name].store.note, className="words"),
            html.Span(problem, className="bad"),
        ]
        return [parts, no_update if news == before else news]
