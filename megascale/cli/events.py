"""`megascale events`: queries of a run's event store, in SQL or by name."""

from __future__ import annotations

import argparse
import csv
import datetime
import decimal
import difflib
import json
import math
import sys
from pathlib import Path
from typing import Any

from megascale.cli.arguments import add_json, positive_float, rank_ranges, step_range
from megascale.cli.command_output import warn
from megascale.core.errors import Exit
from megascale.core.process import exit_on_stop_signals
from megascale.operate.store.query import Answer, StoreError, answer, open_store
from megascale.operate.store.reading import read_store
from megascale.operate.store.ready_queries import READY_QUERIES
from megascale.operate.store.schema import schema_page
from megascale.operate.store.spans import OTLP_STEPS, SPAN_GROUPS
from megascale.operate.store.table_files import STORE_FOLDER

DEFAULT_SPANS = "per_step"  # preset of span groups that is exported

MAX_CELL = 60


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    folder = "the run's folder, or the path or URL of its event store"
    sub.add_argument("run", metavar="RUN", nargs="?", help=folder)
    sub.add_argument("query", metavar="QUERY", nargs="?", help="a SELECT, or the name of a ready query (see --list)")
    last = "only what was stored in the last seconds of the run"
    sub.add_argument("--last", metavar="SECONDS", type=positive_float, help=last)
    export = sub.add_argument_group("export to OpenTelemetry, in the place of a query")
    receiver = "send spans to an OTLP/HTTP receiver, such as http://localhost:4318"
    export.add_argument("--otlp", metavar="URL", help=receiver)
    export.add_argument(
        "--spans", choices=SPAN_GROUPS, help=f"Megatron-LM's presets of span groups (default: {DEFAULT_SPANS})"
    )
    export.add_argument("--ranks", metavar="LIST", type=rank_ranges, help="ranks, such as 0,1,4-7 (default: the first)")
    steps = f"steps A to B, both included (default: the last {OTLP_STEPS})"
    export.add_argument("--steps", metavar="A:B", type=step_range, help=steps)
    form = sub.add_mutually_exclusive_group()
    form.add_argument("--list", action="store_true", help="list the ready queries")
    form.add_argument("--schema", action="store_true", help="describe the tables")
    add_json(form)
    form.add_argument("--csv", action="store_true", help="print CSV with a head line")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if options.list:
        width = max(map(len, READY_QUERIES))
        print("\n".join(f"{name:<{width}}  {query.help}" for name, query in READY_QUERIES.items()))
        return Exit.OK
    if options.schema:
        print(schema_page())
        return Exit.OK
    if options.otlp is not None and options.run is not None:
        return _export(options)
    if options.spans or options.ranks or options.steps:
        hint = "in a query write WHERE rank = ... AND step BETWEEN ... AND ..."
        raise StoreError("--spans, --ranks and --steps choose what --otlp sends", hint=hint)
    if options.run is None or options.query is None:
        raise StoreError("RUN or QUERY is missing", hint="megascale events RUN slowest-ranks; see --list and --schema")
    sql = query_text(options.query)
    with exit_on_stop_signals():
        reading = read_store(options.run, lambda store: answer(store, sql), last_s=options.last)
        found = Answer(reading.value.columns, [tuple(map(_in_utc, row)) for row in reading.value.rows])
    warn(reading.notes)
    if options.json:
        print(json.dumps({"columns": found.columns, "rows": [[_plain(value) for value in row] for row in found.rows]}))
    elif options.csv:
        csv.writer(sys.stdout).writerows([found.columns, *found.rows])
    else:
        print(format_rows(found))
    return Exit.OK


def _export(options: argparse.Namespace) -> int:
    from megascale.operate.store.otlp import choose, export_spans

    if options.query is not None:
        raise StoreError("--otlp stands in the place of a query", hint="leave out --otlp, or the query")
    with exit_on_stop_signals():
        reading = read_store(
            options.run,
            lambda store: choose(store, options.spans or DEFAULT_SPANS, options.ranks, options.steps),
            last_s=options.last,
        )
        warn(reading.notes)
        store, choice = open_store(options.run, last_s=options.last, without=reading.damaged), reading.value
        sent = export_spans(store, _run_name(options.run), choice, options.otlp)
    print(f"{sent.spans} spans of {sent.steps} steps and {sent.ranks} ranks sent to {options.otlp}")
    return Exit.OK


def _run_name(run: str) -> str:
    """Return the name of a run by the path or URL of its folder, or of its store."""
    parts = run.rstrip("/").split("/") if "://" in run else Path(run).resolve().parts
    return parts[-2] if parts[-1] == STORE_FOLDER and len(parts) > 1 else parts[-1]


def query_text(query: str) -> str:
    """Return the SQL of a ready query, and any other text as it is. Raises: StoreError for an unknown name"""
    if query in READY_QUERIES:
        return READY_QUERIES[query].sql
    if query.strip() and not any(char.isspace() for char in query.strip()):
        close = difflib.get_close_matches(query, READY_QUERIES, 1)
        hint = f"did you mean {close[0]}?" if close else "a SELECT, or a name of megascale events --list"
        raise StoreError(f"there is no ready query {query!r}", hint=hint)
    return query


def _in_utc(value: Any) -> Any:
    """Return a time with its zone, which DuckDB's values do not say."""
    return value.replace(tzinfo=datetime.UTC) if isinstance(value, datetime.datetime) and not value.tzinfo else value


def format_rows(found: Answer) -> str:
    """Format rows as a table: numbers to the right, texts to the left."""
    cells = [[_cell(value) for value in row] for row in found.rows]
    columns = []
    for index, name in enumerate(found.columns):
        texts = [name, *(line[index] for line in cells)]
        number = all(isinstance(row[index], int | float | decimal.Decimal | None) for row in found.rows)
        width = max(map(len, texts))
        columns.append([text.rjust(width) if number else text.ljust(width) for text in texts])
    lines = ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
    return "\n".join([*lines, "" if cells else "no rows"]).rstrip()


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}..."


def _plain(value: Any) -> Any:
    """Return a value that JSON has: NaN is null, and what is no number is a text."""
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | str | None) else str(value)
