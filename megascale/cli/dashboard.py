"""`megascale dashboard`: runs as a web page, on loopback and behind a token, without torch."""

from __future__ import annotations

import argparse
import contextlib
import re
import secrets
import socket
from pathlib import Path

from megascale.cli.arguments import checked, read_digits
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.core.network import LOOPBACK, is_loopback
from megascale.core.process import interrupt_on_stop_signals

PORT = 8050  # the port that is tried first, if none is given

ANY_ADDRESS = ("0.0.0.0", "::")

EXTRA_HINT = "pip install 'megascale[dashboard]'; megascale watch and megascale report do without"


def _base_path(text: str) -> str:
    path = f"{text.rstrip('/')}/"
    if not re.fullmatch(r"/([\w.~@%+-]+/)*", path, re.ASCII) or re.search(r"/\.\.?/", path):
        raise ValueError(text)
    return path


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    sub.add_argument("folders", metavar="RUN", type=Path, nargs="+", help="folders of runs, shown side by side")
    host = "address to listen on (127.0.0.1); others send the token in clear"
    sub.add_argument("--host", default=LOOPBACK, help=host)
    base = "path of the pages at a reverse proxy, whether it strips the path or not, such as /proxy/8050/ (/)"
    base_path = checked("the path of an address, such as /proxy/8050/", _base_path)
    sub.add_argument("--base-path", metavar="PATH", type=base_path, default="/", help=base)
    port = checked("a port", read_digits, lambda number: number <= 65_535)
    sub.add_argument("--port", type=port, help=f"port (default: {PORT}, or a free one)")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
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
        runs = watched_runs(options.folders)
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
