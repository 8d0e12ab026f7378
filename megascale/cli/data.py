"""`megascale data`: prepare and inspect token datasets."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from megascale.catalog.tokenizers import TOKENIZERS
from megascale.cli.numbers import count
from megascale.core.errors import DataError, Exit
from megascale.core.files import fingerprint
from megascale.core.process import usable_cores
from megascale.core.units import format_bytes, format_count
from megascale.data import indexed
from megascale.data.prepare import Request, prepare
from megascale.data.tokenizer import Tokenizer, load_tokenizer

SHOWN = 80
"""Tokens of a document that `inspect` shows."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    verbs = sub.add_subparsers(dest="verb", metavar="VERB", required=True)
    make = verbs.add_parser("prepare", help="text or .jsonl files to a token dataset (.bin, .idx, .json)")
    kinds = ".jsonl, .ndjson, .json: a document a line; else a document a file"
    make.add_argument("inputs", metavar="INPUT", nargs="+", type=Path, help=kinds)
    make.add_argument("--output", metavar="PREFIX", type=Path, required=True, help="path without ending")
    make.add_argument("--tokenizer", metavar="NAME|FILE", required=True, help="bytes, or a tokenizer.json")
    make.add_argument("--key", metavar="FIELD", default="text", help="field of a line with the text (default: text)")
    make.add_argument("--eod", metavar="TOKEN", help="token that ends a document (default: <|endoftext|> and its like)")
    make.add_argument(
        "--workers", metavar="N", type=count, default=usable_cores(), help="processes (default: one a core)"
    )
    make.add_argument("--json", action="store_true", help="print one JSON object")
    look = verbs.add_parser("inspect", help="what a token dataset holds")
    look.add_argument("prefix", metavar="PREFIX", type=Path)
    look.add_argument("--tokenizer", metavar="NAME|FILE", help="to show text (default: the one it was made with)")
    look.add_argument(
        "--documents", metavar="N", type=int, default=2, help="documents to show the start of (default: 2)"
    )
    look.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    if options.verb == "inspect":
        return _inspect(options)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _prepare(options)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return Exit.INTERRUPTED


def _prepare(options: argparse.Namespace) -> int:
    request = Request(options.inputs, options.output, options.tokenizer, options.key, options.eod, options.workers)
    if options.json:
        print(json.dumps(asdict(prepare(request))))
        return Exit.OK
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    total = sum(path.stat().st_size for path in options.inputs if path.is_file())
    console = Console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        made = prepare(request, lambda size: bar.advance(task, size))
    print(
        f"{options.output}: {format_count(made.documents)} documents, {format_count(made.tokens)} tokens from "
        f"{format_bytes(total)} of input, vocabulary {made.vocab_size}"
    )
    return Exit.OK


def _inspect(options: argparse.Namespace) -> int:
    reader = indexed.read(options.prefix)
    facts = {
        "documents": len(reader),
        "tokens": len(reader.tokens),
        "format": str(reader.tokens.dtype),
        "made_with": reader.made and asdict(reader.made),
    }
    if options.json:
        print(json.dumps(facts))
        return Exit.OK
    print(f"{options.prefix}: {len(reader)} documents, {len(reader.tokens)} tokens, stored as {reader.tokens.dtype}")
    if reader.made:
        origin = reader.made.tokenizer
        print(f"tokenizer {origin.name}, vocabulary {reader.made.vocab_size}, end of document {origin.eod}")
    for line in _texts(options, reader):
        print(line)
    return Exit.OK


def _texts(options: argparse.Namespace, reader: indexed.Reader) -> Iterator[str]:
    """The start of some documents as text, or why there is none."""
    origin = reader.made.tokenizer if reader.made else None
    tokenizer = _asked(options.tokenizer, origin) if options.tokenizer else _remembered(origin)
    if tokenizer is None:
        yield "made by another tool, or its tokenizer is not here any more: give --tokenizer to see text"
        return
    for index in range(min(options.documents, len(reader))):
        start = tokenizer.decode(reader[index][:SHOWN].tolist())
        yield f"document {index}, {len(reader[index])} tokens: {start!r}"


def _asked(name: str, origin: indexed.Origin | None) -> Tokenizer:
    """The tokenizer `name`.

    Raises: DataError if it is missing, or is not the one that made the dataset.
    """
    tokenizer = load_tokenizer(name, origin.eod if origin else 0)  # which token ends documents does not matter here
    if origin and tokenizer.fingerprint != origin.fingerprint:
        raise DataError(f"{name} is not the tokenizer that made the dataset ({origin.name})", mend="give that one")
    return tokenizer


def _remembered(origin: indexed.Origin | None) -> Tokenizer | None:
    """The tokenizer that made the dataset, if it is still there unchanged."""
    if origin is None:
        return None
    path = Path(origin.name)
    there = origin.name in TOKENIZERS.cards or (path.is_file() and fingerprint(path) == origin.fingerprint)
    return load_tokenizer(origin.name, origin.eod) if there else None
