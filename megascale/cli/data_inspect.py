"""`megascale data inspect`: facts about a token dataset, and the begin of some documents."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from megascale.catalog.data import TOKENIZERS
from megascale.cli.arguments import add_json, non_negative_int
from megascale.core.errors import DataError, Exit
from megascale.core.files import fingerprint, is_file
from megascale.data.prepare.tokenizer import Tokenizer, load_tokenizer
from megascale.data.read.block_cache import BlockCache
from megascale.data.read.indexed_dataset import IndexedDataset, TokenizerInfo, open_dataset

SHOWN_TOKENS, MOST_IDS = 80, 5  # tokens of a document that are shown, and ids without a token that are named
CACHE_BYTES = 1 << 30  # bytes of blocks of a remote dataset that are kept


def add_arguments(look: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    look.add_argument("prefix", metavar="PREFIX", help="path or URL of the dataset, without suffix")
    look.add_argument("--tokenizer", metavar="NAME|FILE", help="decodes the text (default: the dataset's tokenizer)")
    documents = "documents to show (default: 2)"
    look.add_argument("--documents", metavar="N", type=non_negative_int, default=2, help=documents)
    add_json(look)


def run(options: argparse.Namespace) -> int:
    """Run the verb and return its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        reader = open_dataset(options.prefix, BlockCache(Path(folder), CACHE_BYTES))
        info, tokens = reader.info, reader.tokens
        if options.json:
            facts = {"documents": len(reader), "tokens": len(tokens), "format": str(tokens.dtype)}
            print(json.dumps({**facts, "made_with": info and asdict(info)}))
            return Exit.OK
        print(f"{options.prefix}: {len(reader)} documents, {len(tokens)} tokens, stored as {tokens.dtype}")
        if info:
            origin = info.tokenizer
            print(f"tokenizer {origin.name}, vocabulary {info.vocab_size}, end of document {origin.eod}")
        for line in _preview_lines(options, reader):
            print(line)
    return Exit.OK


def _preview_lines(options: argparse.Namespace, reader: IndexedDataset) -> Iterator[str]:
    """Yield the start of some documents as text, or the reason why no text can be shown."""
    tokenizer = _load_tokenizer(options.tokenizer, reader.info.tokenizer if reader.info else None)
    if tokenizer is None:
        yield "the dataset names no tokenizer that can be loaded here: give --tokenizer to see text"
        return
    for index in range(min(options.documents, len(reader))):
        shown = reader[index][:SHOWN_TOKENS].tolist()
        yield f"document {index}, {len(reader[index])} tokens: {tokenizer.decode(shown)!r}"
        if outside := sorted({id for id in shown if not 0 <= id < tokenizer.vocab_size}):
            ids = ", ".join(map(str, outside[:MOST_IDS])) + ", ..." * (len(outside) > MOST_IDS)
            yield f"  not shown: ids {ids}, outside of the tokenizer's {tokenizer.vocab_size} tokens"


def _load_tokenizer(name: str | None, origin: TokenizerInfo | None) -> Tokenizer | None:
    """Load the tokenizer `name`, or the dataset's; None if the file of the latter is missing or has changed.

    Raises: DataError if the tokenizer `name` is missing, or is not the dataset's
    """
    if name:
        tokenizer = load_tokenizer(name, origin.eod if origin else 0)  # the end-of-document token is not used here
        if origin and tokenizer.fingerprint != origin.fingerprint:
            raise DataError(f"{name} is not the dataset's tokenizer, {origin.name}", hint=f"give {origin.name}")
        return tokenizer
    if origin is None:
        return None
    path = Path(origin.name)
    unchanged = is_file(path, optional=True) and fingerprint(path) == origin.fingerprint
    there = origin.name in TOKENIZERS.cards or unchanged
    return load_tokenizer(origin.name, origin.eod) if there else None
