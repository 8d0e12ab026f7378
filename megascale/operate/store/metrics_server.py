"""The server of Prometheus' metrics: `GET /metrics` on loopback or an address that the user named, and nothing else.

Strangers can ask too, so everything is bounded: connections, their time and bytes, and the work for them, because text
is made once a second at most. The server's threads are daemons and hold no lock of others: a scrape never delays a
heartbeat, and the server's end waits for nobody.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megascale.core.network import listen

CONNECTIONS = 8  # connections that are served at a time; more are closed at once
CONNECTION_S = 5.0  # longest time of a connection
FRESH_S = 1.0  # age up to which a text is sent again
PORTS = 32  # ports that are tried, from the configured one on: agents of one host each take one
POLL_S = 0.25  # seconds between looks at the age of connections, and at the end of the server

Render = Callable[[], bytes]
Say = Callable[[str], None]


class MetricsServer(ThreadingHTTPServer):
    """Serves what `render` returns at `host` and the first free port from `port` on, in `run`, until `close`: to
    CONNECTIONS connections at a time, each for CONNECTION_S. `port`: the one taken. `say`: for a line about the first
    error of `render`, which is a bug.

    Raises: OSError if no port is free, or the address is not of this host
    """

    timeout = POLL_S

    def __init__(self, render: Render, host: str, port: int, say: Say) -> None:
        listener = _listen(host, port)
        self.port: int = listener.getsockname()[1]
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._render, self._text, self._made = render, b"", -FRESH_S
        self._say: Say | None = say
        self._rendering, self._lock = threading.Lock(), threading.Lock()
        self._open: dict[socket.socket, float] = {}
        self._closed = threading.Event()

    def run(self) -> None:
        """Serve until another thread calls `close`."""
        with self:
            while not self._closed.is_set():
                self.handle_request()  # waits POLL_S at most
                with self._lock:
                    old = [one for one, since in self._open.items() if time.monotonic() - since > CONNECTION_S]
                for request in old:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let `run` return within POLL_S."""
        self._closed.set()

    def text(self) -> bytes:
        """Return the text of `render`, made anew if it is older than FRESH_S."""
        with self._rendering:
            if time.monotonic() - self._made >= FRESH_S:
                self._text, self._made = self._render(), time.monotonic()
            return self._text

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            accepted = len(self._open) < CONNECTIONS
            if accepted:
                self._open[request] = time.monotonic()
        if accepted:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Forget errors of connections, and tell other errors once: a stranger must not fill the log."""
        error = sys.exception()
        if self._say is not None and not isinstance(error, OSError):
            self._say(f"WARNING: metrics cannot be made: {error!r}")
            self._say = None


def _listen(host: str, port: int) -> socket.socket:
    last = min(port + PORTS, 1 << 16) - 1
    for one in range(port, last + 1):
        try:
            return listen(host, one)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"ports {port} to {last} are in use")


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    server_version, sys_version = "megascale", ""
    timeout = CONNECTION_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        text = self.server.text()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for a request."""
