"""`megascale data`: prepare and inspect token datasets."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from megascale.core.errors import Exit
from megascale.core.units import format_bytes, format_count
from megascale.data import indexed
from megascale.data.prepare import Request, prepare
from megascale.data.tokenizer import load_tokenizer


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    verbs = sub.add_subparsers(dest="verb", metavar="VERB", required=True)
    make = verbs.add_parser("prepare", help="text or .jsonl files to a token dataset (.bin, .idx, .json)")
    make.add_argument(
        "inputs", metavar="INPUT", nargs="+", type=Path, help=".jsonl: a document a line; else a document a file"
    )
    make.add_argument("--output", metavar="PREFIX", type=Path, required=True, help="path without ending")
    make.add_argument("--tokenizer", metavar="NAME|FILE", required=True, help="bytes, or a tokenizer.json")
    make.add_argument("--key", default="text", help="field of a JSON line with the text (default: text)")
    make.add_argument("--eod", metavar="TOKEN", help="token that ends a document (default: <|endoftext|> and its like)")
    make.add_argument(
        "--workers", metavar="N", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)"
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
    return _prepare(options) if options.verb == "prepare" else _inspect(options)


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
        f"{options.output}: {format_count(made.documents)} documents, {format_count(made.tokens)} tokens of "
        f"{made.vocab_size} kinds, from {format_bytes(total)} of text"
    )
    return Exit.OK


def _inspect(options: argparse.Namespace) -> int:
    reader, made = indexed.read(options.prefix), indexed.describe(options.prefix)
    tokens = int(reader.lengths.sum())
    facts = {
        "documents": len(reader),
        "tokens": tokens,
        "format": str(reader.tokens.dtype),
        "made_with": made and asdict(made),
    }
    if options.json:
        print(json.dumps(facts))
        return Exit.OK
    print(f"{options.prefix}: {len(reader)} documents, {tokens} tokens, stored as {reader.tokens.dtype}")
    name = options.tokenizer or (made and made.tokenizer["name"])
    if made:
        print(
            f"tokenizer {made.tokenizer['name']}, vocabulary {made.vocab_size}, end of document {made.tokenizer['eod']}"
        )
    if not name:
        print("made by another tool: give --tokenizer to see text")
        return Exit.OK
    tokenizer = load_tokenizer(name)
    for index in range(min(options.documents, len(reader))):
        start = tokenizer.decode([int(i) for i in reader[index][:80]])
        print(f"document {index}, {len(reader[index])} tokens: {start!r}")
    return Exit.OK
