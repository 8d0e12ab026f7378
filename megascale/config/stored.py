"""The rules of what a run finds on disk and leaves there: datasets, tokenizers, checkpoints."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from megascale.catalog.tokenizers import TOKENIZERS
from megascale.config.finding import Finding, Rule
from megascale.config.run import FOREIGN, prefixes
from megascale.core.files import expanded, fingerprint, readable


def data_is_given(c: Any) -> Iterator[Finding]:
    """There is something to train on, and to validate on if asked for."""
    d = c.data
    if d.mock and (d.train or d.valid):
        yield Finding(
            "data.mock", "both mock data and datasets are asked for", "remove data.mock or data.train and data.valid"
        )
    if not d.mock and d.train is None:
        yield Finding(
            "data.train",
            "no training data",
            'data.train = "prefix" (see `megascale data prepare`), or data.mock = true',
        )
    if c.train.eval_every and not d.mock and d.valid is None and d.split[1] == 0:
        yield Finding(
            "data.split",
            "evaluation needs validation data, but its share is 0",
            "data.valid, or a second share above 0",
        )
    if d.split[0] == 0:
        yield Finding("data.split", "the share of training documents is 0", "for example [0.99, 0.01]")


@dataclass(frozen=True)
class Prepared:
    """What `megascale data prepare` wrote of a dataset beside it: the tokens it needs, and the tokenizer it was made
    with.
    """

    prefix: str
    vocab_size: int
    tokenizer: str
    fingerprint: str


def data_files(c: Any) -> Iterator[Finding]:
    """Datasets exist, and were made with one tokenizer and for the vocabulary of this run."""
    d = c.data
    first: Prepared | None = None
    for key, source in (("data.train", d.train), ("data.valid", d.valid)):
        for prefix in prefixes(source):
            missing = [prefix + end for end in (".bin", ".idx") if not readable(prefix + end)]
            if missing:
                is_file = readable(prefix)
                mend = "a prefix is the path without .bin" if is_file else "`megascale data prepare` makes them"
                yield Finding(key, f"there is no file {' nor '.join(missing)}", mend)
                continue
            try:
                made = _prepared(prefix)
            except (OSError, ArithmeticError, ValueError, LookupError, TypeError, RecursionError) as error:
                yield Finding(key, f"{prefix}.json cannot be read: {error!r}", "prepare the data again")
                continue
            if made is not None:
                yield from _unfit(key, made, first or made, d.tokenizer, c.model.vocab_size)
                first = first or made
    if d.tokenizer and d.tokenizer not in TOKENIZERS.cards and not readable(d.tokenizer):
        yield Finding(
            "data.tokenizer", f"there is no file {d.tokenizer}", "leave it out, or give the tokenizer of the data"
        )


def _prepared(prefix: str) -> Prepared | None:
    """The description of a dataset; None if it has none, for another tool made it."""
    path = Path(prefix + ".json")
    if not path.exists():
        return None
    facts = json.loads(path.read_text(encoding="utf-8"))
    made = facts["tokenizer"]
    return Prepared(prefix, int(facts["vocab_size"]), str(made["name"]), str(made["fingerprint"]))


def _unfit(key: str, made: Prepared, first: Prepared, tokenizer: str | None, vocab_size: int) -> Iterator[Finding]:
    """What speaks against a dataset beside the run's first one."""
    if made.vocab_size > vocab_size:
        found = f"{vocab_size} is less than the {made.vocab_size} tokens of {made.prefix}"
        yield Finding("model.vocab_size", found, f"at least {made.vocab_size}")
    if tokenizer and _fingerprint(tokenizer) not in (None, made.fingerprint):
        found = f"{tokenizer} is not the tokenizer that made {made.prefix} ({made.tokenizer})"
        yield Finding("data.tokenizer", found, "give that one, or prepare again")
    elif made.fingerprint != first.fingerprint:
        found = f"{first.prefix} and {made.prefix} were made with different tokenizers"
        yield Finding(key, found, "prepare one again")


def _fingerprint(tokenizer: str) -> str | None:
    """What a dataset's description calls a tokenizer by; None if the file is missing, which is a finding of its own."""
    if tokenizer in TOKENIZERS.cards:
        return tokenizer
    return fingerprint(Path(tokenizer)) if readable(tokenizer) else None


def resume(c: Any) -> Iterator[Finding]:
    """A checkpoint that is named exists."""
    value = c.checkpoint.resume
    if value.startswith(FOREIGN):
        folder = value.removeprefix(FOREIGN)
        if not readable(expanded(folder) / "config.json"):
            yield Finding(
                "checkpoint.resume",
                f"there is no config.json in {folder or repr(folder)}",
                "a folder of Hugging Face's, by its path on this host",
            )
    elif "://" not in value and value not in ("auto", "never") and not _is_checkpoint(Path(value)):
        mend = f"auto, never, a folder with a manifest.json, a run's folder, or {FOREIGN}FOLDER"
        yield Finding("checkpoint.resume", f"there is no checkpoint in {value or repr(value)}", mend)


def _is_checkpoint(folder: Path) -> bool:
    """Whether it is one, or a run's with some."""
    if readable(folder / "manifest.json"):
        return True
    try:
        return any(folder.glob("step-*/manifest.json")) or any(folder.glob("checkpoints/step-*/manifest.json"))
    except (OSError, ValueError):
        return False


def memory(c: Any) -> Iterator[Finding]:
    """Copies in memory come beside checkpoints."""
    if c.checkpoint.memory_every and not c.checkpoint.every:
        yield Finding("checkpoint.memory_every", "checkpoint.every is 0", "checkpoint.every above 0")
    if c.checkpoint.replicate and not c.checkpoint.memory_every:
        yield Finding("checkpoint.replicate", "checkpoint.memory_every is 0", "checkpoint.memory_every above 0")
    folder = c.checkpoint.memory_dir
    if c.checkpoint.memory_every and not (Path(folder).is_absolute() and os.access(folder, os.W_OK | os.X_OK)):
        found = f"{folder!r} is no folder that can be written to, by its whole path"
        yield Finding("checkpoint.memory_dir", found, "/dev/shm, or another of a file system that is memory")


def file_system(c: Any) -> Iterator[Finding]:
    """A URL is whole, what its file system needs is installed, and others than this process see what is there."""
    for key in ("dir", "resume"):
        text = getattr(c.checkpoint, key)
        if key == "resume" and text.startswith(FOREIGN):
            continue  # a path
        protocol, separator, place = (text or "").partition("://")
        if separator and "::" in protocol:
            mend = "the last URL of the chain"
            yield Finding(f"checkpoint.{key}", f"{text} is a chain of file systems, which ranks do not share", mend)
        elif separator and place and protocol != "memory":
            try:
                fsspec.get_filesystem_class(protocol)
            except (ImportError, ValueError) as error:
                yield Finding(f"checkpoint.{key}", f"{protocol}: {error}", "pip install what fsspec names, or a path")
        elif separator and place:
            mend = "a path, or checkpoint.memory_every for copies in memory"
            yield Finding(f"checkpoint.{key}", f"{text} is seen by one process alone", mend)
        elif separator or (key == "dir" and (text == "" or re.match(r"[a-z0-9]+:/", text or ""))):
            mend = "such as /data/runs or s3://bucket/runs"
            yield Finding(f"checkpoint.{key}", f"{text!r} is no path and no URL", mend)


def kept(c: Any) -> Iterator[Finding]:
    """Some are kept for good only where others are not."""
    if c.checkpoint.keep_every and not c.checkpoint.keep:
        yield Finding("checkpoint.keep_every", "checkpoint.keep is 0: all are kept", "checkpoint.keep above 0")


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("data", "train"), data_is_given),
    (("data", "model"), data_files),
    (("checkpoint",), resume),
    (("checkpoint",), memory),
    (("checkpoint",), file_system),
    (("checkpoint",), kept),
)
"""Each with the sections that it reads (`config.rules`)."""
