"""Export of a run's spans by OTLP/HTTP, from its event store: ranks take no part in it, and pay nothing.

Needs the extra `otel`. Headers, time limits and certificates come from OpenTelemetry's own variables, such as
OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megascale import __version__
from megascale.core.errors import Exit, MegascaleError
from megascale.core.rank import format_ranks
from megascale.operate.store.query import NEWEST_STEP, fetch, fetch_rows
from megascale.operate.store.spans import OTLP_STEPS, SpanSelection, TraceSpan, read_spans, span_id, trace_id

if TYPE_CHECKING:
    import duckdb
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

BATCH = 512  # spans in a request
CONNECT_S = 10.0  # longest time until the receiver's host answers


class OtlpError(MegascaleError):
    """Spans that cannot be exported."""

    exit_status = Exit.CONFIG


@dataclass(frozen=True)
class Exported:
    """Numbers of spans, steps and ranks that were sent."""

    spans: int
    steps: int
    ranks: int


def choose(
    store: duckdb.DuckDBPyConnection, groups: str, ranks: Sequence[range] | None, steps: range | None
) -> SpanSelection:
    """Return what is exported: by default the first rank, and the last OTLP_STEPS steps of the last attempt.

    Raises: OtlpError
    """
    known = fetch(store, "SELECT DISTINCT rank FROM steps ORDER BY rank")["rank"].tolist()
    newest = fetch(store, f"SELECT {NEWEST_STEP} AS step")["step"].tolist()[0]
    chosen = known[:1] if ranks is None else [rank for rank in known if any(rank in one for one in ranks)]
    span = range(max(1, newest - OTLP_STEPS + 1), newest + 1) if steps is None else steps
    if not known:
        raise OtlpError("the store has no steps", hint="the first rows come with a run's first steps")
    if not chosen:
        raise OtlpError("the store has no steps of these ranks", hint=f"it has {format_ranks(known)}")
    return SpanSelection(groups, chosen, span[0], span[-1])


def traces_url(url: str) -> str:
    """Return the URL of the receiver of traces: a URL without a path gets the standard one. Raises: OtlpError"""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise OtlpError(f"{url!r} is no URL of an OTLP/HTTP receiver", hint="such as http://localhost:4318")
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/traces"


def export_spans(store: duckdb.DuckDBPyConnection, run: str, choice: SpanSelection, url: str) -> Exported:
    """Send the spans of a store to a receiver. `run`: its name.

    Raises: OtlpError if OpenTelemetry is not installed, there are no spans, or the receiver does not take them
    """
    endpoint = traces_url(url)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise OtlpError(f"OpenTelemetry is not installed: {error}", hint="pip install 'megascale[otel]'") from None
    _connect(endpoint)
    resources, count, steps = rank_resources(store, run), 0, set[tuple[int, int]]()
    with _log_lines() as lines:
        exporter = OTLPSpanExporter(endpoint=endpoint)
        try:
            found = read_spans(store, choice)
            while spans := list(itertools.islice(found, BATCH)):
                if exporter.export([*_sdk_spans(run, spans, resources)]) is not SpanExportResult.SUCCESS:
                    why = lines[0].getMessage() if lines else "no reason is known"
                    raise OtlpError(f"{endpoint} does not take spans: {why}", hint="is it an OTLP/HTTP receiver?")
                count += len(spans)
                steps |= {(span.attempt, span.step) for span in spans}
        finally:
            exporter.shutdown()
    if not count:
        asked = f"steps {choice.first} to {choice.last} have no spans of the preset {choice.groups}"
        raise OtlpError(asked, hint="check --steps; `--spans per_step` has every step")
    return Exported(count, len(steps), len(choice.ranks))


def _connect(endpoint: str) -> None:
    """Look whether anything listens: at once, where OpenTelemetry would try again for its whole time limit."""
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or {"http": 80, "https": 443}[parts.scheme]
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        why = error.strerror or error
        raise OtlpError(f"nothing answers at {host}:{port}: {why}", hint="start a collector, or check --otlp") from None


@contextlib.contextmanager
def _log_lines() -> Iterator[list[logging.LogRecord]]:
    """Collect what OpenTelemetry logs in a `with` block, in the place of stderr: a failure says its first line."""
    logger, handler = logging.getLogger("opentelemetry"), BufferingHandler(sys.maxsize)
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


def rank_resources(store: duckdb.DuckDBPyConnection, run: str) -> dict[tuple[int, int], Resource]:
    """Return the resources by attempt and rank: host, process, and the rank's place in the layout."""
    from opentelemetry.sdk.resources import Resource

    axes = {
        "tp": "tensor_parallel", "cp": "context_parallel", "dp": "data_parallel", "pp": "pipeline_parallel",
        "ep": "expert_parallel",
    }  # fmt: skip
    sizes = ", ".join(f"1 + max({axis}) OVER (PARTITION BY attempt) AS {axis}s" for axis in axes)
    once = "QUALIFY row_number() OVER (PARTITION BY attempt, rank ORDER BY start_ns DESC) = 1"
    resources = {}
    for row in fetch_rows(store, f"SELECT *, {sizes} FROM ranks {once}"):
        attributes: dict[str, Any] = {
            "service.name": "megascale",
            "service.version": __version__,
            "service.instance.id": f"{run}-rank{row['rank']}",
            "megascale.run": run,
            "megascale.attempt": row["attempt"],
            "host.name": row["host"],
            "process.pid": row["pid"],
            "dl.rank": row["rank"],
            "dl.world_size": row["world"],
        }
        for axis, name in axes.items():
            attributes |= {f"dl.{name}.size": row[f"{axis}s"], f"dl.{name}.rank": row[axis]}
        resources[row["attempt"], row["rank"]] = Resource(attributes)
    return resources


def _sdk_spans(
    run: str, spans: Sequence[TraceSpan], resources: dict[tuple[int, int], Resource]
) -> Iterator[ReadableSpan]:
    """Make OpenTelemetry's spans."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags

    scope, sampled = InstrumentationScope("megascale", __version__), TraceFlags(TraceFlags.SAMPLED)
    for span in spans:
        own, parent = (
            SpanContext(trace_id(run, span), span_id(run, span, key, rank), is_remote=False, trace_flags=sampled)
            for key, rank in ((span.key, span.rank), (span.parent, span.parent_rank))
        )
        yield ReadableSpan(
            span.name, own, parent if span.parent else None, resources.get((span.attempt, span.rank)), span.attributes,
            start_time=span.start_ns, end_time=span.end_ns, instrumentation_scope=scope,
        )  # fmt: skip
