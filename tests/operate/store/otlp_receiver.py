"""A receiver of OTLP/HTTP on loopback, which decodes what it gets."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came, with the attributes of its resource."""

    trace: bytes
    id: bytes
    parent: bytes
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Receiver:
    """What came: spans in order, and the path and headers of each request."""

    url: str
    spans: list[ReceivedSpan] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)


@contextmanager
def receiver(statuses: Sequence[int] = ()) -> Iterator[Receiver]:
    """Start a receiver. `statuses`: of its first answers; then it takes all."""
    answers = iter(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            if (status := next(answers, 200)) == 200:
                packed = self.headers.get("Content-Encoding") == "gzip"
                found.spans.extend(decode(gzip.decompress(body) if packed else body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def decode(body: bytes) -> Iterator[ReceivedSpan]:
    """Yield the spans of a request."""
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = {one.key: value(one.value) for one in group.resource.attributes}
        for scope in group.scope_spans:
            for span in scope.spans:
                attributes = {one.key: value(one.value) for one in span.attributes}
                times = (span.start_time_unix_nano, span.end_time_unix_nano)
                yield ReceivedSpan(
                    span.trace_id, span.span_id, span.parent_span_id, span.name, *times, attributes, resource
                )


def value(message: Any) -> Any:
    """Return the value of an attribute."""
    return getattr(message, message.WhichOneof("value"))
