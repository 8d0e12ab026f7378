"""Export of a run's spans by OTLP/HTTP, from its event store: ranks take no part in it, and pay nothing.

Needs the extra `otel`. Headers, timeouts and certificates come from OpenTelemetry's own variables, such as
OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megascale import __version__
from megascale.core.errors import Exit, MegascaleError
from megascale.core.rank import format_ranks
from megascale.eventstore.query import fetch
from megascale.export.spans import OTLP_STEPS, TRAIN_STEP, SpanSelection, TraceSpan, read_spans, span_id, trace_id

if TYPE_CHECKING:
    import duckdb
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

BATCH = 512
"""Spans in a request."""

TRACES_PATH = "/v1/traces"


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
    """Return what is exported: by default the first rank, and the last OTLP_STEPS steps. Raises: OtlpError"""
    known = fetch(store, "SELECT DISTINCT rank FROM steps ORDER BY rank")["rank"].tolist()
    newest = fetch(store, "SELECT coalesce(max(step), 0) AS step FROM steps")["step"].tolist()[0]
    chosen = known[:1] if ranks is None else [rank for rank in known if any(rank in one for one in ranks)]
    span = range(max(1, newest - OTLP_STEPS + 1), newest + 1) if steps is None else steps
    if not chosen:
        raise OtlpError(
            "the store has no steps of these ranks", hint=f"it has ranks {format_ranks(known)}" if known else ""
        )
    return SpanSelection(groups, chosen, span[0], span[-1])


def traces_url(url: str) -> str:
    """Return the URL of the receiver of traces: a URL without a path gets the standard one. Raises: OtlpError"""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise OtlpError(f"{url!r} is no URL of an OTLP/HTTP receiver", hint="such as http://localhost:4318")
    return url if parts.path.strip("/") else f"{url.rstrip('/')}{TRACES_PATH}"


def export_spans(store: duckdb.DuckDBPyConnection, run: str, choice: SpanSelection, url: str) -> Exported:
    """Send the spans of a store to a receiver. `run`: its name.

    Raises: OtlpError if OpenTelemetry is not installed, or the receiver does not take them
    """
    endpoint = traces_url(url)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise OtlpError(f"OpenTelemetry is not installed: {error}", hint="pip install 'megascale[otel]'") from None
    resources = rank_resources(store, run)
    exporter, count, steps = OTLPSpanExporter(endpoint=endpoint), 0, set[tuple[int, int]]()
    try:
        for spans in _batches(read_spans(store, choice)):
            if exporter.export([*_sdk_spans(run, spans, resources, choice)]) is not SpanExportResult.SUCCESS:
                raise OtlpError(f"{endpoint} does not take spans", hint="see the lines above; is a collector there?")
            count += len(spans)
            steps |= {(span.attempt, span.step) for span in spans}
    finally:
        exporter.shutdown()
    return Exported(count, len(steps), len(choice.ranks))


def _batches(spans: Iterator[TraceSpan]) -> Iterator[list[TraceSpan]]:
    while batch := list(itertools.islice(spans, BATCH)):
        yield batch


def rank_resources(store: duckdb.DuckDBPyConnection, run: str) -> dict[int, Resource]:
    """Return the resource of each rank: host, process, and its place in the layout."""
    from opentelemetry.sdk.resources import Resource

    ranks = fetch(store, "SELECT * FROM ranks QUALIFY row_number() OVER (PARTITION BY rank ORDER BY attempt DESC) = 1")
    axes = {"tp": "tensor_parallel", "cp": "context_parallel", "dp": "data_parallel", "pp": "pipeline_parallel"}
    sizes = {axis: int(ranks[axis].max()) + 1 for axis in axes if len(ranks[axis])}
    resources = {}
    for index, rank in enumerate(ranks["rank"].tolist()):
        attributes: dict[str, Any] = {
            "service.name": "megascale",
            "service.version": __version__,
            "service.instance.id": f"{run}-rank{rank}",
            "megascale.run": run,
            "host.name": ranks["host"][index],
            "process.pid": int(ranks["pid"][index]),
            "dl.rank": rank,
            "dl.world_size": int(ranks["world"][index]),
        }
        for axis, name in axes.items():
            attributes |= {f"dl.{name}.size": sizes[axis], f"dl.{name}.rank": int(ranks[axis][index])}
        resources[rank] = Resource(attributes)
    return resources


def _sdk_spans(
    run: str, spans: Sequence[TraceSpan], resources: dict[int, Resource], choice: SpanSelection
) -> Iterator[ReadableSpan]:
    """Make OpenTelemetry's spans. The steps of other ranks are children of the first rank's, as in one trace."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags

    scope, sampled = InstrumentationScope("megascale", __version__), TraceFlags(TraceFlags.SAMPLED)
    first = min(choice.ranks)
    for span in spans:

        def context(key: str, rank: int, span: TraceSpan = span) -> SpanContext:
            return SpanContext(trace_id(run, span), span_id(run, span, key, rank), is_remote=False, trace_flags=sampled)

        parent = context(span.parent, span.rank) if span.parent else None
        if span.key == TRAIN_STEP and span.rank != first:
            parent = context(TRAIN_STEP, first)
        yield ReadableSpan(
            name=span.name,
            context=context(span.key, span.rank),
            parent=parent,
            resource=resources.get(span.rank),
            attributes=span.attributes,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )
