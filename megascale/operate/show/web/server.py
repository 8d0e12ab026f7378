"""The dashboard's HTTP server: a bounded number of connections, each with a timeout, and no log of its URLs."""

from __future__ import annotations

import socket
import threading
from typing import Any

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

MOST_CONNECTIONS = 64  # connections that are served at a time; others wait
TIMEOUT_S = 30.0  # seconds in which a connection must send its request


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_request(self, *arguments: Any) -> None:
        """Print nothing: the first URL has the token."""


class DashboardServer(ThreadedWSGIServer):
    """A server of `app` that listens on `listener`."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, app: Any) -> None:
        host, port = listener.getsockname()[:2]
        super().__init__(host, port, app, handler=_Handler, fd=listener.fileno())
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, once one is free."""
        self._free.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()
