"""From text files to a token dataset, in several processes.

Documents are read in order, tokenized in batches by worker processes, and written in the order of the input, each ended
by the tokenizer's end-of-document token. No torch.
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
from megascale.data.documents import documents
from megascale.data.indexed import Description, Origin, write
from megascale.data.tokenizer import Tokenizer, load_tokenizer

BATCH = 1 << 18
"""Characters that a worker tokenizes at once, or one document that has more."""

_worker_tokenizer: Tokenizer  # of a worker process, loaded once by `_start_worker`


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

    Raises: DataError, naming file and line, for input that is not text, and for files that cannot be read or written.
    """
    tokenizer = load_tokenizer(request.tokenizer, request.eod)
    _check_paths(request)
    origin = Origin(tokenizer.name, tokenizer.fingerprint, tokenizer.eod)
    with closing(_tokenized(request, tokenizer, _batches(_texts(request, progress)))) as found:
        return write(request.output, found, origin, tokenizer.vocab_size)


def _check_paths(request: Request) -> None:
    """Refuse what would fail after hours, or would overwrite an input."""
    for path in request.inputs:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
            raise DataError(f"{path} {what}", mend="give text or .jsonl files")
    output = request.output
    if output.name in ("", ".."):
        raise DataError(f"{output} is a folder", mend=f"add a name for the files: {output / 'NAME'}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"the folder {output.parent} cannot be made: {error.strerror}"
        raise DataError(reason, mend="another --output") from None
    sources = {path.resolve() for path in (*request.inputs, Path(request.tokenizer))}
    for ending in (".bin", ".idx", ".json"):
        target = output.with_name(output.name + ending)
        if target.resolve() in sources:
            raise DataError(f"{target} would be overwritten, but it is read", mend="another --output")


def _texts(request: Request, progress: Callable[[int], None]) -> Iterator[str]:
    """The documents of all files in order."""
    for path in request.inputs:
        for text, size in documents(path, request.key):
            yield text
            progress(size)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in lists of about BATCH characters."""
    batch: list[str] = []
    room = BATCH
    for text in texts:
        batch.append(text)
        room -= len(text) + 1
        if room <= 0:
            yield batch
            batch, room = [], BATCH
    yield batch


def _tokenized(request: Request, tokenizer: Tokenizer, batches: Iterable[list[str]]) -> Generator[np.ndarray]:
    """The ids of each document that is not empty, in order, by this process or by workers."""
    if request.workers == 1:
        encoded: Iterable[list[np.ndarray]] = (_encode(tokenizer, batch) for batch in batches)
    else:
        encoded = _in_workers(request, batches)
    for ids in encoded:
        yield from ids


def _in_workers(request: Request, batches: Iterable[list[str]]) -> Iterator[list[np.ndarray]]:
    """`_encode` of each batch in order; the workers are kept a few batches ahead."""
    pool = ProcessPoolExecutor(
        request.workers,
        mp_context=multiprocessing.get_context("spawn"),  # the progress bar's thread makes a fork unsafe
        initializer=_start_worker,
        initargs=(request.tokenizer, request.eod),
    )
    waiting: deque[Future[list[np.ndarray]]] = deque()
    try:
        for batch in batches:
            waiting.append(_submit(pool, batch))
            if len(waiting) > 4 * request.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        what = "a worker process died, perhaps killed for the memory that it took"
        raise DataError(what, mend="fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, batch: list[str]) -> Future[list[np.ndarray]]:
    """Hand a batch to the pool, which may start a worker for it: Ctrl-C is for this process, so the worker inherits
    that it is blocked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode_in_worker, batch)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(name: str, eod: str | None) -> None:
    global _worker_tokenizer  # a worker process has no other place for what its initializer made
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many workers as the user wants threads
    _worker_tokenizer = load_tokenizer(name, eod)


def _leave_with_parent() -> None:
    """End this worker when the process that started it is killed: its queue would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


def _encode_in_worker(texts: list[str]) -> list[np.ndarray]:
    return _encode(_worker_tokenizer, texts)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Ids, i32, of each text that has any, ended by eod."""
    found = (np.asarray(ids, dtype=np.int32) for ids in tokenizer.encode(texts))
    return [np.append(ids, np.int32(tokenizer.eod)) for ids in found if len(ids)]
