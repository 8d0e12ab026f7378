"""Tokenization of text files to a dataset, in several processes.

Documents are read in order, tokenized in batches by worker processes, terminated by the end-of-document token, and
written in the order of the input. No torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale.core.errors import DataError
from megascale.core.limits import PROCESSES_HINT, os_error_hint
from megascale.data.documents import read_documents
from megascale.data.indexed_dataset import DatasetInfo, TokenizerInfo, write_dataset
from megascale.data.tokenizer import Tokenizer, load_tokenizer

BATCH_CHARACTERS = 1 << 18
"""Characters of a batch for a worker. A document with more characters is a batch by itself."""

_worker_tokenizer: Tokenizer  # of a worker process, loaded once by `_start_worker`


@dataclass(frozen=True)
class PrepareRequest:
    """The arguments of `megascale data prepare`. `key`: the JSON field that holds the text. `add_bos`: begin each
    document with the tokenizer's beginning-of-text token.
    """

    inputs: Sequence[Path]
    output: Path
    tokenizer: str
    key: str = "text"
    eod: str | None = None
    add_bos: bool = False
    workers: int = 1


@dataclass(frozen=True)
class Frame:
    """The ids that begin and end each document; `bos` is None for no beginning."""

    bos: int | None
    eod: int


def prepare_dataset(request: PrepareRequest, progress: Callable[[int], None] = lambda size: None) -> DatasetInfo:
    """Write `request.output`.bin, .idx and .json. `progress` is called for every document with its bytes of input.

    Raises: DataError, naming file and line, for input that is not text, and for unreadable or unwritable files.
    """
    tokenizer = load_tokenizer(request.tokenizer, request.eod)
    _check_paths(request)
    frame = Frame(_bos(tokenizer) if request.add_bos else None, tokenizer.eod)
    origin = TokenizerInfo(tokenizer.name, tokenizer.fingerprint, tokenizer.eod, tokenizer.eod_origin, frame.bos)
    with closing(_tokenized(request, tokenizer, frame, _batches(_texts(request, progress)))) as token_ids:
        return write_dataset(request.output, token_ids, origin, tokenizer.vocab_size)


def _bos(tokenizer: Tokenizer) -> int:
    """The beginning-of-text id.

    Raises: DataError if no file names one
    """
    if tokenizer.bos is None:
        raise DataError(f"{tokenizer.name} does not say which token begins a text", hint="leave out --add-bos")
    return tokenizer.bos


def _check_paths(request: PrepareRequest) -> None:
    """Refuse missing inputs, an unwritable output folder, and an output that would overwrite an input.

    Raises: DataError before hours of work are spent
    """
    for path in request.inputs:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
            raise DataError(f"{path} {what}", hint="give text or .jsonl files")
    output = request.output
    if output.name in ("", ".."):
        raise DataError(f"{output} is a folder", hint=f"add a name for the files: {output / 'NAME'}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"the folder {output.parent} cannot be made: {error.strerror}"
        raise DataError(reason, hint=os_error_hint(error, "another --output")) from None
    sources = {path.resolve() for path in (*request.inputs, Path(request.tokenizer))}
    for ending in (".bin", ".idx", ".json"):
        target = output.with_name(output.name + ending)
        if target.resolve() in sources:
            raise DataError(f"{target} would be overwritten, but it is read", hint="another --output")


def _texts(request: PrepareRequest, progress: Callable[[int], None]) -> Iterator[str]:
    """The documents of all files in order."""
    for path in request.inputs:
        for text, size in read_documents(path, request.key):
            yield text
            progress(size)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts into lists of about BATCH_CHARACTERS characters."""
    batch: list[str] = []
    remaining = BATCH_CHARACTERS
    for text in texts:
        batch.append(text)
        remaining -= len(text) + 1
        if remaining <= 0:
            yield batch
            batch, remaining = [], BATCH_CHARACTERS
    yield batch


def _tokenized(
    request: PrepareRequest, tokenizer: Tokenizer, frame: Frame, batches: Iterable[list[str]]
) -> Generator[np.ndarray]:
    """The token ids of all non-empty documents in order, encoded by this process or by workers."""
    if request.workers == 1:
        encoded: Iterable[list[np.ndarray]] = (_encode(tokenizer, frame, batch) for batch in batches)
    else:
        encoded = _in_workers(request, frame, batches)
    for ids in encoded:
        yield from ids


def _in_workers(request: PrepareRequest, frame: Frame, batches: Iterable[list[str]]) -> Iterator[list[np.ndarray]]:
    """Run `_encode` in worker processes, with a few batches in flight; results are in order."""
    pool = ProcessPoolExecutor(
        request.workers,
        mp_context=multiprocessing.get_context("spawn"),  # the progress bar's thread makes a fork unsafe
        initializer=_start_worker,
        initargs=(request.tokenizer, frame.eod),
    )
    in_flight: deque[Future[list[np.ndarray]]] = deque()
    try:
        for batch in batches:
            in_flight.append(_submit(pool, frame, batch))
            if len(in_flight) > 4 * request.workers:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    except BrokenProcessPool:
        what = "a worker process died: it was killed, perhaps because memory ran out, or could not start"
        raise DataError(what, hint="fewer --workers, or more memory") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, frame: Frame, batch: list[str]) -> Future[list[np.ndarray]]:
    """Submit a batch to the pool. SIGINT is blocked meanwhile: a worker that the pool starts inherits the mask, and
    Ctrl-C reaches this process alone.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode_in_worker, frame, batch)
    except OSError as error:
        what = f"a worker process cannot be started: {error.strerror or error}"
        raise DataError(what, hint=f"fewer --workers; {os_error_hint(error, 'one works in this process')}") from None
    except RuntimeError as error:  # "can't start new thread"
        raise DataError(f"a worker cannot be started: {error}", hint=f"fewer --workers; {PROCESSES_HINT}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(name: str, eod: int) -> None:
    global _worker_tokenizer  # an initializer can hand its result to a worker only through a global
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers sets the parallelism, with a thread per worker
    _worker_tokenizer = load_tokenizer(name, eod)


def _exit_with_parent() -> None:
    """End this worker when its parent process is killed; otherwise the worker would wait on its queue forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


def _encode_in_worker(frame: Frame, texts: list[str]) -> list[np.ndarray]:
    return _encode(_worker_tokenizer, frame, texts)


def _encode(tokenizer: Tokenizer, frame: Frame, texts: list[str]) -> list[np.ndarray]:
    """The token ids (i32) of the non-empty texts, with bos, if any, before and eod after."""
    start = np.array([] if frame.bos is None else [frame.bos], dtype=np.int32)
    end = np.array([frame.eod], dtype=np.int32)
    encoded = (np.asarray(ids, dtype=np.int32) for ids in tokenizer.encode(texts))
    return [np.concatenate((start, ids, end)) for ids in encoded if len(ids)]
