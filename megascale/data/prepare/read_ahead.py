"""Iterators of several files, read ahead by a thread each and joined in their order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from queue import Empty, Full, Queue
from typing import Generic, TypeVar

T = TypeVar("T")

POLL_S = 0.1

_END = object()


class _ReadAhead(Generic[T]):
    """A thread that fills a queue of `depth` items from an iterable, until `stop` is set."""

    def __init__(self, items: Callable[[], Iterable[T]], depth: int, stop: threading.Event) -> None:
        self._items = items
        self._stop = stop
        self._queue: Queue[object] = Queue(depth)
        self._thread = threading.Thread(target=self._fill, name="read ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while (item := self._queue.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item  # type: ignore[misc]

    def _fill(self) -> None:
        try:
            for item in self._items():
                if not self._put(item):
                    return
        except BaseException as error:  # raised where the items are read
            self._put(error)
        self._put(_END)

    def _put(self, item: object) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
                return True
            except Full:
                continue
        return False

    def join(self) -> None:
        """Wait for the end of the thread."""
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=POLL_S)
            except Empty:
                self._thread.join(POLL_S)


def read_ahead(sources: Iterable[Callable[[], Iterable[T]]], threads: int, depth: int) -> Generator[T]:
    """Yield the items of all sources in order. Up to `threads` sources are read at a time, `depth` items ahead each."""
    stop, open_sources, remaining = threading.Event(), deque[_ReadAhead[T]](), iter(sources)
    try:
        while True:
            while len(open_sources) < threads and (source := next(remaining, None)) is not None:
                open_sources.append(_ReadAhead(source, depth, stop))
            if not open_sources:
                return
            yield from open_sources[0]
            open_sources.popleft()
    finally:
        stop.set()
        for source_thread in open_sources:
            source_thread.join()
