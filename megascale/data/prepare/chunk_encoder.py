"""Tokenization of chunks, in this process or in workers, with results in the order of the chunks."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megascale.core.errors import DataError
from megascale.core.limits import PROCESSES_HINT, os_error_hint
from megascale.core.process import die_with_parent
from megascale.data.prepare.documents import Chunk, read_documents, split_text
from megascale.data.prepare.tokenizer import Tokenizer, load_tokenizer

EMPTY = "empty"  # the reason to skip a document without tokens
TASKS_PER_WORKER = 4  # tasks that wait for a worker or run in it


@dataclass(frozen=True)
class Encoding:
    """How documents become tokens. `key`: the field or column of the text. `bos`: the id that begins each document, or
    None; `eod` ends each. `skip_bad`: skip what is no text, instead of raising.
    """

    tokenizer: str
    eod: int
    bos: int | None
    key: str
    skip_bad: bool


Skipped = dict[str, tuple[int, str]]
"""Documents that were skipped, by reason: their number, and the place of the first with its error."""


def count_skipped(skipped: Skipped, reason: str, count: int, first: str) -> None:
    """Count documents that come after those counted before."""
    before, place = skipped.get(reason, (0, first))
    skipped[reason] = before + count, place


@dataclass
class EncodedChunks:
    """The tokens of consecutive chunks, i32, and the lengths of their documents. `continues`: the first document began
    in an earlier chunk; `open_end`: the last one goes on in the next.
    """

    tokens: np.ndarray
    lengths: list[int]
    continues: bool
    open_end: bool
    skipped: Skipped


def encode_chunks(encoding: Encoding, tokenizer: Tokenizer, chunks: Sequence[Chunk]) -> EncodedChunks:
    """Tokenize the documents of chunks in order; documents without tokens are skipped.

    Raises: DataError for what is no text, unless `skip_bad`
    """
    skipped, parts, lengths = Skipped(), list[np.ndarray](), list[int]()
    for chunk in chunks:
        for ids in _encode_chunk(encoding, tokenizer, chunk, skipped):
            if chunk.begins or not lengths:
                lengths.append(0)
            lengths[-1] += len(ids)
            parts.append(ids)
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
    continues = bool(parts) and not chunks[0].begins
    return EncodedChunks(tokens, lengths, continues, bool(parts) and not chunks[-1].ends, skipped)


def _encode_chunk(encoding: Encoding, tokenizer: Tokenizer, chunk: Chunk, skipped: Skipped) -> Iterator[np.ndarray]:
    texts, places = [], []
    for place, text in read_documents(chunk, encoding.key):
        if isinstance(text, str):
            texts.append(text)
            places.append(place)
        elif encoding.skip_bad and chunk.begins and chunk.ends:
            count_skipped(skipped, text.reason, 1, f"{text}")
        else:
            raise text
    pieces = [split_text(text) for text in texts]
    encoded = iter(tokenizer.encode(list(chain.from_iterable(pieces))))
    for place, of_text in zip(places, pieces, strict=True):
        ids = [np.asarray(next(encoded), dtype=np.int32) for _ in of_text]
        if chunk.begins and chunk.ends and not any(map(len, ids)):
            count_skipped(skipped, EMPTY, 1, place)
            continue
        before = [] if encoding.bos is None or not chunk.begins else [encoding.bos]
        after = [encoding.eod] if chunk.ends else []
        yield np.concatenate([np.array(before, np.int32), *ids, np.array(after, np.int32)])


def encode_in_workers(encoding: Encoding, workers: int, tasks: Iterable[Sequence[Chunk]]) -> Generator[EncodedChunks]:
    """Tokenize in worker processes, with a few tasks in flight; results are in order.

    Raises: DataError, also if a worker dies or cannot be started
    """
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),  # the progress bar's thread makes a fork unsafe
        initializer=_start_worker,
        initargs=(encoding, os.getpid()),
    )
    in_flight: deque[Future[EncodedChunks]] = deque()
    try:
        for chunks in tasks:
            in_flight.append(_submit(pool, chunks))
            if len(in_flight) > TASKS_PER_WORKER * workers:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    except BrokenProcessPool:
        what = "a worker process died: it was killed, perhaps because memory ran out, or could not start"
        raise DataError(what, hint="the same command continues; fewer --workers, or more memory") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, chunks: Sequence[Chunk]) -> Future[EncodedChunks]:
    """Submit chunks to the pool. SIGINT is blocked meanwhile: a worker that the pool starts inherits the mask, and
    Ctrl-C reaches this process alone.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode_in_worker, chunks)
    except OSError as error:
        what = f"a worker process cannot be started: {error.strerror or error}"
        raise DataError(what, hint=f"fewer --workers; {os_error_hint(error, 'one works in this process')}") from None
    except BrokenProcessPool:
        raise
    except RuntimeError as error:  # "can't start new thread"
        raise DataError(f"a worker cannot be started: {error}", hint=f"fewer --workers; {PROCESSES_HINT}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: tuple[Encoding, Tokenizer]  # of a worker process, made once by `_start_worker`


def _start_worker(encoding: Encoding, parent: int) -> None:
    global _worker  # an initializer can hand its result to a worker only through a global
    die_with_parent(parent)  # else it would wait on its queue forever
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers sets the parallelism, with a thread per worker
    _worker = encoding, load_tokenizer(encoding.tokenizer, encoding.eod)


def _encode_in_worker(chunks: Sequence[Chunk]) -> EncodedChunks:
    return encode_chunks(*_worker, chunks)
