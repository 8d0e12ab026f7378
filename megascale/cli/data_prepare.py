"""`megascale data prepare`: text, .jsonl or .parquet files as a token dataset."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields

from megascale.cli.arguments import add_json, local_path, positive_int
from megascale.cli.command_output import print_progress
from megascale.core.errors import Exit
from megascale.core.files import exists
from megascale.core.process import usable_cores
from megascale.core.units import format_bytes, format_count
from megascale.data.prepare.preparation import Prepared, PrepareRequest, prepare_dataset, progress_file
from megascale.data.prepare.tokenizer import load_tokenizer


def add_arguments(make: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    kinds = "a document per line of .jsonl, .ndjson and .json, per row of .parquet, per file of any other"
    kinds += "; also .gz and .zst of these, folders, patterns and URLs"
    make.add_argument("inputs", metavar="INPUT", nargs="+", help=kinds)
    output = "path of the dataset, without suffix"
    make.add_argument("--output", metavar="PREFIX", type=local_path, required=True, help=output)
    make.add_argument("--tokenizer", metavar="NAME|FILE", required=True, help="bytes, or the path of a tokenizer.json")
    key = "field or column with the text; a.b is the field b in a (default: text)"
    make.add_argument("--key", metavar="FIELD", default="text", help=key)
    make.add_argument("--eod", metavar="TOKEN", help="end-of-document token (default: as the tokenizer's files say)")
    make.add_argument("--add-bos", action="store_true", help="begin documents with the beginning-of-text token")
    make.add_argument("--skip-bad", action="store_true", help="skip and count what is no text")
    workers = "processes (default: one per core)"
    make.add_argument("--workers", metavar="N", type=positive_int, default=usable_cores(), help=workers)
    add_json(make)


def run(options: argparse.Namespace) -> int:
    """Run the verb and return its exit status."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _prepare(options)
    except KeyboardInterrupt:
        kept = exists(progress_file(options.output))
        print(f"interrupted: {'the same command continues' if kept else 'nothing was written'}", file=sys.stderr)
        return Exit.INTERRUPTED


def _prepare(options: argparse.Namespace) -> int:
    request = PrepareRequest(**{field.name: getattr(options, field.name) for field in fields(PrepareRequest)})
    if options.json:
        made = prepare_dataset(request, say=print_progress)
        skipped = {reason: {"count": count, "first": first} for reason, (count, first) in made.skipped.items()}
        facts = {**asdict(made), "skipped": skipped}
        print(json.dumps(facts.pop("dataset") | facts))
        return Exit.OK
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        made = prepare_dataset(
            request, lambda done, total: bar.update(task, completed=done, total=total), print_progress
        )
    for line in _prepared_lines(options, made):
        print(line)
    return Exit.OK


def _prepared_lines(options: argparse.Namespace, made: Prepared) -> Iterator[str]:
    info, files = made.dataset, "" if made.files == 1 else f" in {made.files} files"
    yield (
        f"{options.output}: {format_count(info.documents)} documents, {format_count(info.tokens)} tokens from "
        f"{format_bytes(made.bytes)} of input{files}, vocabulary {info.vocab_size}"
    )
    tokenizer = load_tokenizer(options.tokenizer, info.tokenizer.eod)

    def shown(id: int) -> str:
        text = tokenizer.decode([id])
        return f"{text!r}, token {id}" if text else f"token {id}"

    begin = "" if info.tokenizer.bos is None else f"begin with {shown(info.tokenizer.bos)}, and "
    yield f"documents {begin}end with {shown(info.tokenizer.eod)} ({info.tokenizer.eod_origin})"
    for reason, (count, first) in made.skipped.items():
        yield f"skipped {count} {reason}, the first: {first}"
    if made.ignored_files:
        yield f"did not read {made.ignored_files} files of other kinds"
