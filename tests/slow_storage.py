"""A stand-in for slow storage: files of a folder over HTTP, by ranges, with a delay, and counted."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class SlowStorage:
    """`url`: of the folder. `delay_s`: of a request for content. `sent`: bytes by name of the file; `at_once`: most
    requests that waited at the same time.
    """

    def __init__(self, folder: Path, delay_s: float) -> None:
        self.folder = folder
        self.delay_s = delay_s
        self.url = ""
        self.sent: dict[str, int] = {}
        self.at_once = self._waiting = 0
        self._lock = threading.Lock()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer HEAD, and GET of a range or of the whole file."""
        path = self.folder / request.path.lstrip("/")
        if not path.is_file():
            request.send_error(404)
            return
        size = path.stat().st_size
        first, _, last = request.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or size - 1) + 1, size)
        request.send_response(206 if "Range" in request.headers else 200)
        request.send_header("ETag", str(path.stat().st_mtime_ns))
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        request.send_header("Content-Length", str(stop - start))
        request.end_headers()
        if request.command == "HEAD":
            return
        with self._lock:
            self.sent[path.name] = self.sent.get(path.name, 0) + stop - start
            self._waiting += 1
            self.at_once = max(self.at_once, self._waiting)
        time.sleep(self.delay_s)
        with self._lock:
            self._waiting -= 1
        with open(path, "rb") as file:
            file.seek(start)
            request.wfile.write(file.read(stop - start))


@contextmanager
def slow_storage(folder: Path, delay_s: float = 0.0) -> Iterator[SlowStorage]:
    """Serve a folder on this host."""
    storage = SlowStorage(folder, delay_s)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            storage.answer(self)

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    storage.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield storage
    finally:
        server.shutdown()
        server.server_close()


def main(folder: str, delay_s: str) -> None:
    """Serve a folder until the standard input ends; print the URL."""
    with slow_storage(Path(folder), float(delay_s)) as storage:
        print(storage.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
