"""Iterators of several files, read ahead by a thread each and joined in their order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from queue import Full, Queue
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.1  # seconds after which a thread with a full queue looks whether its items are wanted any more

_END = object()


def read_ahead(sources: Iterable[Callable[[], Iterable[T]]], threads: int, depth: int) -> Generator[T]:
    """Yield the items of all sources in order. Up to `threads` sources are read at a time, `depth` items ahead each."""
    stop, remaining = threading.Event(), iter(sources)
    reading = deque[tuple[threading.Thread, Queue[object]]]()
    try:
        while True:
            while len(reading) < threads and (source := next(remaining, None)) is not None:
                queue: Queue[object] = Queue(depth)
                thread = threading.Thread(target=_fill, args=(queue, source, stop), name="read ahead", daemon=True)
                thread.start()
                reading.append((thread, queue))
            if not reading:
                return
            while (item := reading[0][1].get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                yield item  # type: ignore[misc]
            reading.popleft()
    finally:
        stop.set()
        for thread, _ in reading:
            thread.join()


def _fill(queue: Queue[object], source: Callable[[], Iterable[T]], stop: threading.Event) -> None:
    """Put the items of a source into a queue, and then its error or the end, until `stop` is set."""

    def put(item: object) -> bool:
        while not stop.is_set():
            try:
                queue.put(item, timeout=POLL_S)
                return True
            except Full:
                continue
        return False

    try:
        for item in source():
            if not put(item):
                return
        put(_END)
    except BaseException as error:  # raised where the items are read
        put(error)
