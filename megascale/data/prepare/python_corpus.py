"""A corpus of the sources of Python's standard library, and a tokenizer trained on it: text that every host has."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megascale.core.errors import DataError
from megascale.core.files import atomic_file, write_text
from megascale.data.prepare.special_tokens import USUAL_NAMES

LEFT_OUT = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3")
HELD_OUT = 20  # one module in HELD_OUT is validation data


def modules(library: Path) -> list[tuple[str, str]]:
    """Return (name, source) of the library's modules, without tests, in order of names. Duplicates are dropped, to keep
    training and validation data disjoint.
    """
    names: dict[str, str] = {}
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if not set(LEFT_OUT) & set(name.parts):
            text = path.read_bytes().decode("utf-8", errors="replace")
            if text.strip():
                names.setdefault(text, str(name))
    return [(name, text) for text, name in names.items()]


def write_documents(path: Path, documents: list[tuple[str, str]]) -> None:
    """Write a JSON line with `name` and `text` for every document."""
    with atomic_file(path, "w") as file:
        for name, text in documents:
            file.write(json.dumps({"name": name, "text": text}) + "\n")


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of `vocab_size` tokens, end of document included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[USUAL_NAMES["eos"][0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_corpus(library: Path, output: Path, vocab_size: int) -> None:
    """Write train.jsonl, valid.jsonl (one module in twenty) and tokenizer.json to the folder `output`. They depend only
    on the Python version.

    Raises: DataError if the library has no sources, or the vocabulary is too small for all bytes; OSError
    """
    minimum = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if vocab_size < minimum:
        raise DataError(
            f"a vocabulary of {vocab_size} is too small for all bytes", hint=f"give --vocab-size {minimum} or more"
        )
    documents = modules(library)
    if len(documents) < HELD_OUT:
        raise DataError(f"{library} holds {len(documents)} modules as source", hint="use a Python with its library")
    output.mkdir(parents=True, exist_ok=True)
    train = [document for number, document in enumerate(documents) if number % HELD_OUT]
    write_documents(output / "train.jsonl", train)
    write_documents(output / "valid.jsonl", documents[::HELD_OUT])
    tokenizer = train_tokenizer((text for _, text in train), vocab_size)
    write_text(output / "tokenizer.json", tokenizer.to_str())
    size = sum(len(text) for _, text in documents)
    print(
        f"{output}: {len(documents)} modules of {library}, {size / 1e6:.1f}M characters, "
        f"vocabulary {tokenizer.get_vocab_size()}"
    )
