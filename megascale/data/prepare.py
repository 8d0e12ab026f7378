"""From text files to a token dataset, in several processes.

Documents are read in order, tokenized in batches by worker processes, and written in the order of the input, each ended
by the tokenizer's end-of-document token. No torch.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from megascale.core.errors import DataError
from megascale.data.indexed import Description, write
from megascale.data.tokenizer import Tokenizer, load_tokenizer

T = TypeVar("T")

BATCH = 64
"""Documents that a worker tokenizes at once."""

_worker_tokenizer: Tokenizer  # of a worker process, loaded once by `_load_in_worker`


@dataclass(frozen=True)
class Request:
    """What to prepare. `key`: the field of a JSON line that holds the text."""

    inputs: Sequence[Path]
    output: Path
    tokenizer: str
    key: str = "text"
    eod: str | None = None
    workers: int = 1


def prepare(request: Request, progress: Callable[[int], None] = lambda size: None) -> Description:
    """Write `request.output`.bin, .idx and .json. `progress` is called with the bytes of input that each document took.

    Raises: DataError, naming file and line, for input that is not text.
    """
    tokenizer = load_tokenizer(request.tokenizer, request.eod)
    missing = [str(path) for path in request.inputs if not path.is_file()]
    if missing:
        raise DataError(f"there is no file {' nor '.join(missing)}", mend="give text or .jsonl files")
    request.output.parent.mkdir(parents=True, exist_ok=True)
    facts = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint, "eod": tokenizer.eod}

    def documents() -> Iterator[np.ndarray]:
        batches = _batched(_read_all(request, progress), BATCH)
        for tokenized in _tokenized(request, tokenizer, batches):
            yield from (ids for ids in tokenized if len(ids) > 1)  # nothing but eod: an empty document

    return write(request.output, documents(), facts, tokenizer.vocab_size)


def _tokenized(request: Request, tokenizer: Tokenizer, batches: Iterable[list[str]]) -> Iterator[list[np.ndarray]]:
    """Token ids of each batch in order, by this process or by workers that are kept a few batches ahead."""
    if request.workers <= 1:
        yield from (_encode(tokenizer, batch) for batch in batches)
        return
    arguments = (request.tokenizer, request.eod)
    with ProcessPoolExecutor(request.workers, initializer=_load_in_worker, initargs=arguments) as pool:
        waiting: deque[Future[list[np.ndarray]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) > 4 * request.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _load_in_worker(name: str, eod: str | None) -> None:
    global _worker_tokenizer  # a worker process has no other place for what its initializer made
    _worker_tokenizer = load_tokenizer(name, eod)


def _encode_in_worker(texts: list[str]) -> list[np.ndarray]:
    return _encode(_worker_tokenizer, texts)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    return [np.array([*ids, tokenizer.eod], dtype=np.int64) for ids in tokenizer.encode(texts)]


def _read_all(request: Request, progress: Callable[[int], None]) -> Iterator[str]:
    """The documents of all files in order: a line of a .jsonl file each, any other file as a whole."""
    for path in request.inputs:
        lines = path.suffix in (".jsonl", ".ndjson")
        for text, size in _json_lines(path, request.key) if lines else _whole(path):
            yield text
            progress(size)


def _whole(path: Path) -> Iterator[tuple[str, int]]:
    raw = path.read_bytes()
    try:
        yield raw.decode("utf-8"), len(raw)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8", mend="convert the file to UTF-8") from None


def _json_lines(path: Path, key: str) -> Iterator[tuple[str, int]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # also UnicodeDecodeError
                raise DataError(
                    f"{path}:{number} is not a line of JSON: {error}", mend="mend or remove the line"
                ) from None
            text = record.get(key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                keys = f"its keys are {', '.join(record) or 'none'}" if isinstance(record, dict) else "it is no object"
                raise DataError(f"{path}:{number} has no text under '{key}': {keys}", mend="--key NAME")
            yield text, len(line)


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
