"""`megascale dashboard`: runs as a web page, on loopback and behind a token; or one run as an HTML file. No torch."""

from __future__ import annotations

import argparse
import contextlib
import re
import secrets
import socket
from pathlib import Path

from megascale.cli.arguments import checked, own_file, read_digits
from megascale.cli.command_output import warn, writing
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.core.files import write_text
from megascale.core.network import LOOPBACK, is_loopback
from megascale.core.process import interrupt_on_stop_signals

PORT = 8050  # the port that is tried first, if none is given

ANY_ADDRESS = ("0.0.0.0", "::")

SERVER = {"host": LOOPBACK, "base_path": "/", "port": None}
"""Options of the server, and their defaults."""

EXTRA_HINT = "pip install 'megascale[dashboard]'; megascale watch and megascale dashboard --file do without"


def _base_path(text: str) -> str:
    path = f"{text.rstrip('/')}/"
    if not re.fullmatch(r"/([\w.~@%+-]+/)*", path, re.ASCII) or re.search(r"/\.\.?/", path):
        raise ValueError(text)
    return path


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    from megascale.operate.show.charts.shapes import REPORT_START

    sub.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folders of runs, shown side by side")
    output = "write what is known about the run as one HTML file, instead of a server"
    sub.add_argument("--file", metavar="FILE.html", type=own_file(".html", REPORT_START), help=output)
    host = "address to listen on; others than loopback send the token in clear (default: 127.0.0.1)"
    sub.add_argument("--host", metavar="ADDRESS", default=SERVER["host"], help=host)
    base = "path of the pages at a reverse proxy, whether it strips the path or not, such as /proxy/8050/ (default: /)"
    base_path = checked("the path of an address, such as /proxy/8050/", _base_path)
    sub.add_argument("--base-path", metavar="PATH", type=base_path, default="/", help=base)
    port = checked("a port", read_digits, lambda number: number <= 65_535)
    sub.add_argument("--port", metavar="PORT", type=port, help=f"port (default: {PORT}, or a free one)")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if options.file is not None:
        return _write_file(options)
    try:
        from megascale.operate.show.web.app import make_app
        from megascale.operate.show.web.runs import watched_runs
        from megascale.operate.show.web.server import DashboardServer
    except ModuleNotFoundError as error:
        if error.name not in ("dash", "plotly", "flask", "werkzeug"):
            raise
        what = f"the dashboard needs the package {error.name}, which is not installed"
        raise ConfigError([Problem("environment", "", what, EXTRA_HINT)]) from None
    token = secrets.token_urlsafe(32)
    with (
        contextlib.suppress(KeyboardInterrupt),
        interrupt_on_stop_signals(),
        open_listener(options.host, options.port) as listener,
        contextlib.ExitStack() as closing,
    ):
        host, port = listener.getsockname()[:2]
        runs = watched_runs(options.runs)
        for each in runs.values():
            closing.callback(each.close)
        base = options.base_path
        app = make_app(runs, token, f"megascale-{port}", base)
        shown = socket.gethostname() if host in ANY_ADDRESS else f"[{host}]" if ":" in host else host
        print(f"open http://{shown}:{port}{base}?token={token} (Ctrl-C ends the dashboard)", flush=True)
        if base != "/":
            print(f"through the proxy: {base}?token={token} at its address", flush=True)
        if is_loopback(host):
            print(f"from another machine: ssh -L {port}:{host}:{port} {socket.gethostname()}", flush=True)
        else:
            print("WARNING: who can record the network's traffic can read the token and the pages", flush=True)
        with DashboardServer(listener, app.server) as server:
            server.serve_forever()
    return Exit.OK


def _write_file(options: argparse.Namespace) -> int:
    from megascale.operate.show.charts.timeline import render_svg
    from megascale.operate.show.html_report import render_report
    from megascale.operate.show.run_reader import RunReader
    from megascale.operate.show.step_events import pictured_events
    from megascale.operate.show.store_view import read_store_view
    from megascale.operate.store.query import StoreError

    given = [f"--{name.replace('_', '-')}" for name, value in SERVER.items() if getattr(options, name) != value]
    if given or len(options.runs) > 1:
        what = "is of a server" if given else "is of one run"
        names = ", ".join(given) if given else "--file"
        raise ConfigError([Problem("command line", names, what, "leave out --file" if given else "give one RUN")])
    folder, notes, store = options.runs[0], list[str](), None
    view = RunReader(folder).read()
    try:
        store = read_store_view(folder)
    except StoreError as error:
        notes.append(f"without the analyses of events: {error.message}")
    notes += store.notes if store is not None else ()
    warn(notes)
    events = pictured_events(folder, view.topology)
    report = render_report(view, store, render_svg(events) if events else "", notes)
    with writing(options.file):
        write_text(options.file, report)
    print(f"{options.file}: {len(report.encode()) / 1024:.0f} KiB, open it in a browser")
    return Exit.OK


def open_listener(host: str, port: int | None) -> socket.socket:
    """Listen at an address; without a port, at PORT or a free one. Raises: ConfigError"""
    for each in (PORT, 0) if port is None else (port,):
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, each), family=family, backlog=16)
        except OSError as error:
            reason = error.strerror or str(error)
    hint = "another --port, or an address of this host"
    where = host if port is None else f"{host}:{port}"
    raise ConfigError([Problem("command line", "--host, --port", f"{where} cannot be used: {reason}", hint)])
