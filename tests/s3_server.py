"""An S3 server on this host, of which a share of the requests may fail, and which counts the bytes that it sends."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

KEYS = {"aws_access_key_id": "key", "aws_secret_access_key": "key", "region_name": "us-east-1"}


class FailingStore:
    """A WSGI application around moto's. `failing_share`: share of GET and HEAD requests that get status 503. `sent`:
    bytes of bodies that GET requests got, by path; `failed`: requests that failed.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        self._app = DomainDispatcherApplication(create_backend_app)
        self._random = random.Random(1)
        self._lock = threading.Lock()
        self.failing_share = 0.0
        self.failed = 0
        self.sent: Counter[str] = Counter()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        reads = environ["REQUEST_METHOD"] in ("GET", "HEAD")
        with self._lock:
            fails = reads and self._random.random() < self.failing_share
            self.failed += fails
        if fails:
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        body = b"".join(self._app(environ, start_response))
        if environ["REQUEST_METHOD"] == "GET":
            with self._lock:
                self.sent[environ["PATH_INFO"]] += len(body)
        return [body]


@contextmanager
def s3_server() -> Iterator[tuple[FailingStore, dict[str, str]]]:
    """Serve S3 with a bucket at s3://bucket. Yields the store and the environment of its clients."""
    import boto3
    from s3fs import S3FileSystem
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        def log(self, *arguments: object) -> None: ...

    store = FailingStore()
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=Silent)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    boto3.client("s3", endpoint_url=url, **KEYS).create_bucket(Bucket="bucket")
    S3FileSystem.clear_instance_cache()  # clients keep the address that the environment named when they were made
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    yield store, {"AWS_ENDPOINT_URL": url, "AWS_MAX_ATTEMPTS": "1"} | dict(zip(names, KEYS.values(), strict=True))
    server.shutdown()
    thread.join()
    S3FileSystem.clear_instance_cache()
