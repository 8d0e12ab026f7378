"""Spans of a run from its event store, with the names of Megatron-core's OpenTelemetry instrumentation.

The names are those of Megatron-LM's documentation (docs/user-guide/observability): `megatron.train_step` and its parts,
in its span groups. What Megatron has no span for is named in its way, `megatron.SUBSYSTEM.OPERATION`; so is the
reduction of gradients, `megatron.grad_sync`, from its issue to its end, where Megatron has its start and its finish.
Attributes that training frameworks share begin with `dl.`, and ours with `megascale.`.

A step is a trace, of all ranks together: identifiers follow from run, attempt, step and rank, so that ranks need not
exchange them, and a second export replaces the first.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megascale.operate.store.query import Row, fetch_rows
from megascale.record.events import COMPUTE, HOST_AXIS, OPTIMIZER_ACTIONS
from megascale.schedule.ir import COMPUTE_KINDS

if TYPE_CHECKING:
    import duckdb

SPAN_GROUPS = ("default", "per_step", "all")
"""Megatron's presets: evaluations and checkpoints; also steps with their phases, data, messages between stages and the
reduction of gradients; also micro-batches and all other communication.
"""

TRAIN_STEP, FORWARD_BACKWARD = "megatron.train_step", "megatron.forward_backward"

OTLP_STEPS = 100  # steps that are exported unless asked otherwise
STEPS_AT_ONCE = 20  # steps that are read together

_HOST = {
    "evaluation": ("megatron.evaluate", 0),
    "checkpoint": ("megatron.save_checkpoint", 0),
    "data": ("megatron.data_loading", 1),
    "gc": ("megatron.train.gc_collect", 1),
}
"""TraceSpan of an activity of the host, and the first of SPAN_GROUPS that has it."""

_MICROBATCH = {kind: f"megatron.microbatch.{compute.name}" for kind, compute in COMPUTE_KINDS.items()}
"""TraceSpan of an action on a micro-batch. A recomputation is a forward again, before its backward."""


@dataclass(frozen=True)
class TraceSpan:
    """A span. `key`: unique in its step and rank. `parent`: the key of another span of the step, or "" for none;
    `parent_rank`: that span's rank. Times in ns since 1970.
    """

    attempt: int
    step: int
    rank: int
    key: str
    name: str
    start_ns: int
    end_ns: int
    parent: str = ""
    parent_rank: int = -1
    attributes: dict[str, Any] = field(default_factory=dict)


def trace_id(run: str, span: TraceSpan) -> int:
    """Return the 128-bit identifier of the trace of a span's step."""
    return _number(16, run, span.attempt, span.step)


def span_id(run: str, span: TraceSpan, key: str, rank: int) -> int:
    """Return the 64-bit identifier of a span with a `key`, on a rank, in the step of another span."""
    return _number(8, run, span.attempt, span.step, rank, key)


def _number(size: int, *parts: object) -> int:
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:size], "big") or 1  # 0 is no identifier


@dataclass(frozen=True)
class SpanSelection:
    """Spans to export: a preset of SPAN_GROUPS, ranks, and steps from `first` to `last`."""

    groups: str
    ranks: Sequence[int]
    first: int
    last: int


def read_spans(store: duckdb.DuckDBPyConnection, choice: SpanSelection) -> Iterator[TraceSpan]:
    """Yield the spans of a store, those of a step together. A parent is always among them: what a killed rank left of a
    step that it did not end has none.
    """
    detail = SPAN_GROUPS.index(choice.groups)
    for first in range(choice.first, choice.last + 1, STEPS_AT_ONCE):
        part = replace(choice, first=first, last=min(choice.last, first + STEPS_AT_ONCE - 1))
        spans = list(_step_spans(store, part)) if detail else []
        spans += _event_spans(store, part, detail)
        known = {(span.attempt, span.step, span.rank, span.key) for span in spans}
        spans = [
            span
            if (span.attempt, span.step, span.parent_rank, span.parent) in known
            else replace(span, parent="", parent_rank=-1)
            for span in spans
        ]
        yield from sorted(spans, key=lambda span: (span.attempt, span.step, span.start_ns, -span.end_ns))


def _rows(store: duckdb.DuckDBPyConnection, columns: str, table: str, choice: SpanSelection) -> list[Row]:
    chosen = "step BETWEEN ? AND ? AND rank IN (SELECT unnest(?::INTEGER[]))"
    sql = f"SELECT attempt, step, rank, {columns} FROM {table} WHERE {chosen} ORDER BY ALL"
    return fetch_rows(store, sql, [choice.first, choice.last, list(choice.ranks)])


def _step_spans(store: duckdb.DuckDBPyConnection, choice: SpanSelection) -> Iterator[TraceSpan]:
    """Spans of steps: a step is a tree, whose root is the span of its first rank."""
    roots: dict[tuple[int, int], int] = {}
    for row in _rows(store, "start_ns, train_ns, loss, grad_norm, tokens, tags", "steps", choice):
        attributes = {
            "megatron.iteration": row["step"], "megatron.loss": row["loss"], "megatron.grad_norm": row["grad_norm"],
            "dl.rank": row["rank"], "megascale.tokens": row["tokens"], "megascale.tags": row["tags"],
        }  # fmt: skip
        root = roots.setdefault((row["attempt"], row["step"]), row["rank"])
        parent = ("", -1) if root == row["rank"] else (TRAIN_STEP, root)
        times = (row["start_ns"], row["start_ns"] + row["train_ns"])
        yield TraceSpan(*_place(row), TRAIN_STEP, TRAIN_STEP, *times, *parent, attributes)


def _event_spans(store: duckdb.DuckDBPyConnection, choice: SpanSelection, detail: int) -> list[TraceSpan]:
    columns = (
        "start_ns, end_ns, axis, name, part, layer, direction, chunk, microbatch, group_name, peer, bytes, exposed_ns"
    )
    rows = _rows(store, columns, "events", choice)
    spans: list[TraceSpan] = []
    if detail:
        spans += _phase(rows, FORWARD_BACKWARD, frozenset(_MICROBATCH))
        spans += _phase(rows, "megatron.optimizer_step", OPTIMIZER_ACTIONS)
    numbers: Counter[tuple[int, int, int]] = Counter()
    for row in rows:
        name, parent, least = _span_of(row)
        numbers[_place(row)] += 1
        if name and detail >= least:
            key, times = f"{name} {numbers[_place(row)]}", (row["start_ns"], row["end_ns"])
            spans.append(TraceSpan(*_place(row), key, name, *times, parent, row["rank"], _attributes(row)))
    return spans


def _place(row: Row) -> tuple[int, int, int]:
    return row["attempt"], row["step"], row["rank"]


def _phase(rows: Sequence[Row], name: str, actions: frozenset[str]) -> Iterator[TraceSpan]:
    """A span of each rank and step from the first to the last of some actions of compute."""
    of_rank: dict[tuple[int, int, int], list[Row]] = {}
    for row in rows:
        if row["axis"] == COMPUTE and row["name"] in actions:
            of_rank.setdefault(_place(row), []).append(row)
    for (attempt, step, rank), found in of_rank.items():
        start, end = min(row["start_ns"] for row in found), max(row["end_ns"] for row in found)
        attributes = {"megatron.iteration": step, "dl.rank": rank}
        if name == FORWARD_BACKWARD:
            attributes["megatron.num_microbatches"] = len({row["microbatch"] for row in found})
        yield TraceSpan(attempt, step, rank, name, name, start, end, TRAIN_STEP, rank, attributes)


def _span_of(row: Row) -> tuple[str, str, int]:
    """Return the name of an event's span, its parent, and the first of SPAN_GROUPS that has it; "" for no span."""
    axis, name = row["axis"], row["name"]
    if axis == HOST_AXIS:
        span, least = _HOST.get(name, ("", 0))
        return span, TRAIN_STEP, least
    if axis == COMPUTE:
        return _MICROBATCH.get(name, ""), FORWARD_BACKWARD, 2
    if name in ("send", "receive"):
        operation = "send" if name == "send" else "recv"
        return f"megatron.p2p.{operation}_{row['direction'] or 'other'}", FORWARD_BACKWARD, 1
    if axis in ("dp", "edp") and name in ("reduce_scatter", "all_reduce"):
        return "megatron.grad_sync", TRAIN_STEP, 1
    return f"megatron.{axis}.{name}", TRAIN_STEP, 2


def _attributes(row: Row) -> dict[str, Any]:
    """Return what is known of an event."""
    found = {"megatron.iteration": row["step"], "dl.rank": row["rank"], "megascale.exposed_s": row["exposed_ns"] / 1e9}
    optional = (
        ("megatron.microbatch_id", "microbatch", -1), ("megascale.model_chunk", "chunk", -1),
        ("megatron.layer_number", "layer", -1), ("megascale.peer", "peer", -1), ("megascale.bytes", "bytes", 0),
        ("megascale.tensor", "part", ""), ("megascale.group", "group_name", ""),
    )  # fmt: skip
    return found | {name: row[column] for name, column, none in optional if row[column] != none}
