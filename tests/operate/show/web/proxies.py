"""A portal on loopback, such as of Jupyter or Open OnDemand, whose reverse proxy leads to a dashboard below a path."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BASE = "/node/n1/8050/"


@dataclass
class Portal:
    """`url`: of its own page, which shows the dashboard in a frame with `query`; `cookies`: of requests for that."""

    url: str
    query: str = ""
    cookies: list[str] = field(default_factory=list)


@contextlib.contextmanager
def portal(port: int, *, strips: bool) -> Iterator[Portal]:
    """Lead requests below BASE to the dashboard at `port`, by their whole path or, with `strips`, without BASE."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith(BASE.rstrip("/")):
                self._forward()
                return
            here.cookies.append(self.headers.get("Cookie", ""))
            frame = f'<iframe id="frame" width="1300" height="900" src="{BASE}{here.query}"></iframe>'
            self._answer(200, [("Content-Type", "text/html")], frame.encode())

        do_POST = do_GET

        def _forward(self) -> None:
            path = f"/{self.path[len(BASE) - 1 :].lstrip('/')}" if strips else self.path
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            backend = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            backend.request(self.command, path, body, dict(self.headers))
            answer = backend.getresponse()
            kept = [pair for pair in answer.getheaders() if pair[0] not in ("Content-Length", "Connection", "Date")]
            self._answer(answer.status, kept, answer.read())
            backend.close()

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response(status)
            for name, value in [*headers, ("Content-Length", str(len(body)))]:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        here = Portal(f"http://127.0.0.1:{server.server_port}/")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield here
        server.shutdown()
        thread.join()
