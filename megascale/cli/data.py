"""`megascale data`: prepare and inspect token datasets."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from megascale.catalog.tokenizers import TOKENIZERS
from megascale.cli import data_of_run
from megascale.cli.argument_types import local_path, non_negative_int, positive_int
from megascale.core.errors import DataError, Exit
from megascale.core.files import exists, fingerprint, is_file
from megascale.core.process import usable_cores
from megascale.core.units import format_bytes, format_count
from megascale.data.prepare.import_dataset import ImportRequest, import_dataset
from megascale.data.prepare.preparation import Prepared, PrepareRequest, prepare_dataset, progress_file
from megascale.data.prepare.tokenizer import Tokenizer, load_tokenizer
from megascale.data.read import indexed_dataset
from megascale.data.read.block_cache import BlockCache

SHOWN_TOKENS, MOST_IDS = 80, 5
"""Tokens of a document that `inspect` shows, and ids without a token that it names."""


INSPECT_BYTES = 1 << 30
"""Bytes of blocks of a remote dataset that `inspect` keeps."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    verbs = sub.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_prepare(verbs.add_parser("prepare", help="tokenize text, .jsonl or .parquet files to a token dataset"))
    _add_import(verbs.add_parser("import", help="convert token files of another project to a token dataset"))
    data_of_run.add_index_arguments(verbs.add_parser("index", help="build the sample indices of a run in advance"))
    data_of_run.add_which_arguments(verbs.add_parser("which", help="name the documents that a step of a run has read"))
    look = verbs.add_parser("inspect", help="describe a token dataset and show some text")
    look.add_argument("prefix", metavar="PREFIX", help="path or URL of the dataset, without suffix")
    look.add_argument("--tokenizer", metavar="NAME|FILE", help="decodes the text (default: the dataset's tokenizer)")
    look.add_argument(
        "--documents", metavar="N", type=non_negative_int, default=2, help="documents to show (default: 2)"
    )
    look.add_argument("--json", action="store_true", help="print one JSON object")


def _add_prepare(make: argparse.ArgumentParser) -> None:
    kinds = (
        "a document per line of .jsonl, .ndjson and .json, per row of .parquet, per file of any other; also .gz and "
    )
    kinds += ".zst of these, folders, patterns and URLs"
    make.add_argument("inputs", metavar="INPUT", nargs="+", help=kinds)
    make.add_argument(
        "--output", metavar="PREFIX", type=local_path, required=True, help="path of the dataset, without suffix"
    )
    make.add_argument("--tokenizer", metavar="NAME|FILE", required=True, help="bytes, or the path of a tokenizer.json")
    key = "field or column with the text; a.b is the field b in a (default: text)"
    make.add_argument("--key", metavar="FIELD", default="text", help=key)
    make.add_argument("--eod", metavar="TOKEN", help="end-of-document token (default: as the tokenizer's files say)")
    make.add_argument("--add-bos", action="store_true", help="begin documents with the beginning-of-text token")
    make.add_argument("--skip-bad", action="store_true", help="skip and count what is no text")
    make.add_argument(
        "--workers", metavar="N", type=positive_int, default=usable_cores(), help="processes (default: one per core)"
    )
    make.add_argument("--json", action="store_true", help="print one JSON object")


def _add_import(make: argparse.ArgumentParser) -> None:
    kinds = ".bin, .npy, .parquet or .arrow of tokens, a prefix of .bin and .idx, or a folder of LitData"
    make.add_argument("inputs", metavar="INPUT", nargs="+", type=Path, help=kinds)
    make.add_argument(
        "--output", metavar="PREFIX", type=local_path, required=True, help="path of the dataset, without suffix"
    )
    make.add_argument("--tokenizer", metavar="NAME|FILE", help="the tokenizer of the tokens, to record in the dataset")
    eod = "id of the token that ends documents (default: the tokenizer's)"
    make.add_argument("--eod", metavar="ID", type=int, help=eod)
    make.add_argument("--dtype", choices=("uint8", "uint16", "uint32", "int32", "int64"), help="dtype of raw tokens")
    make.add_argument(
        "--key", metavar="COLUMN", default="input_ids", help="column of .parquet and .arrow (default: input_ids)"
    )
    make.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    verbs = {"inspect": _inspect, "import": _import, "index": data_of_run.index, "which": data_of_run.which}
    if options.verb in verbs:
        return verbs[options.verb](options)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _prepare(options)
    except KeyboardInterrupt:
        kept = exists(progress_file(options.output))
        print(f"interrupted: {'the same command continues' if kept else 'nothing was written'}", file=sys.stderr)
        return Exit.INTERRUPTED


def _prepare(options: argparse.Namespace) -> int:
    names = {field.name for field in fields(PrepareRequest)}
    request = PrepareRequest(**{name: value for name, value in vars(options).items() if name in names})
    if options.json:
        made = prepare_dataset(request, say=_say)
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
        made = prepare_dataset(request, lambda done, total: bar.update(task, completed=done, total=total), _say)
    for line in _prepared_lines(options, made):
        print(line)
    return Exit.OK


def _import(options: argparse.Namespace) -> int:
    names = {field.name for field in fields(ImportRequest)}
    made = import_dataset(ImportRequest(**{name: value for name, value in vars(options).items() if name in names}))
    info = made.dataset
    if options.json:
        print(json.dumps({"documents": info.documents, "tokens": info.tokens, "formats": made.formats}))
        return Exit.OK
    sizes = f"{format_count(info.documents)} documents, {format_count(info.tokens)} tokens"
    print(f"{options.output}: {sizes} from {' and '.join(made.formats)}")
    if options.tokenizer is None:
        print("no tokenizer is recorded: `megascale check` cannot compare it with those of other datasets")
    return Exit.OK


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _prepared_lines(options: argparse.Namespace, made: Prepared) -> Iterator[str]:
    """Yield the dataset's sizes, what ends its documents, and what was skipped."""
    info, files = made.dataset, "" if made.files == 1 else f" in {made.files} files"
    yield (
        f"{options.output}: {format_count(info.documents)} documents, {format_count(info.tokens)} tokens from "
        f"{format_bytes(made.bytes)} of input{files}, vocabulary {info.vocab_size}"
    )
    tokenizer = load_tokenizer(options.tokenizer, info.tokenizer.eod)
    begin = "" if info.tokenizer.bos is None else f"begin with {_shown(tokenizer, info.tokenizer.bos)}, and "
    yield f"documents {begin}end with {_shown(tokenizer, info.tokenizer.eod)} ({info.tokenizer.eod_origin})"
    for reason, (count, first) in made.skipped.items():
        yield f"skipped {count} {reason}, the first: {first}"
    if made.ignored_files:
        yield f"did not read {made.ignored_files} files of other kinds"


def _shown(tokenizer: Tokenizer, id: int) -> str:
    """A token and its id."""
    text = tokenizer.decode([id])
    return f"{text!r}, token {id}" if text else f"token {id}"


def _inspect(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        _show(options, indexed_dataset.open_dataset(options.prefix, BlockCache(Path(folder), INSPECT_BYTES)))
    return Exit.OK


def _show(options: argparse.Namespace, reader: indexed_dataset.IndexedDataset) -> None:
    facts = {
        "documents": len(reader),
        "tokens": len(reader.tokens),
        "format": str(reader.tokens.dtype),
        "made_with": reader.info and asdict(reader.info),
    }
    if options.json:
        print(json.dumps(facts))
        return
    print(f"{options.prefix}: {len(reader)} documents, {len(reader.tokens)} tokens, stored as {reader.tokens.dtype}")
    if reader.info:
        origin = reader.info.tokenizer
        print(f"tokenizer {origin.name}, vocabulary {reader.info.vocab_size}, end of document {origin.eod}")
    for line in _preview_lines(options, reader):
        print(line)


def _preview_lines(options: argparse.Namespace, reader: indexed_dataset.IndexedDataset) -> Iterator[str]:
    """Yield the start of some documents as text, or the reason why no text can be shown."""
    origin = reader.info.tokenizer if reader.info else None
    tokenizer = _load_requested(options.tokenizer, origin) if options.tokenizer else _load_original(origin)
    if tokenizer is None:
        yield "the dataset names no tokenizer that can be loaded here: give --tokenizer to see text"
        return
    for index in range(min(options.documents, len(reader))):
        shown = reader[index][:SHOWN_TOKENS].tolist()
        yield f"document {index}, {len(reader[index])} tokens: {tokenizer.decode(shown)!r}"
        if outside := sorted({id for id in shown if not 0 <= id < tokenizer.vocab_size}):
            ids = ", ".join(map(str, outside[:MOST_IDS])) + ", ..." * (len(outside) > MOST_IDS)
            yield f"  not shown: ids {ids}, outside of the tokenizer's {tokenizer.vocab_size} tokens"


def _load_requested(name: str, origin: indexed_dataset.TokenizerInfo | None) -> Tokenizer:
    """Load the tokenizer `name`.

    Raises: DataError if the tokenizer is missing, or is not the dataset's.
    """
    tokenizer = load_tokenizer(name, origin.eod if origin else 0)  # the end-of-document token is not used here
    if origin and tokenizer.fingerprint != origin.fingerprint:
        raise DataError(f"{name} is not the dataset's tokenizer, {origin.name}", hint=f"give {origin.name}")
    return tokenizer


def _load_original(origin: indexed_dataset.TokenizerInfo | None) -> Tokenizer | None:
    """Load the dataset's tokenizer; None if its file is missing or has changed."""
    if origin is None:
        return None
    path = Path(origin.name)
    there = origin.name in TOKENIZERS.cards or (
        is_file(path, optional=True) and fingerprint(path) == origin.fingerprint
    )
    return load_tokenizer(origin.name, origin.eod) if there else None
