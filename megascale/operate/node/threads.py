"""Calls between an event loop, and threads and processes.

- `call_in_thread`: what may never return, such as a call to a sick GPU or file server, beside the loop
- `call_in_loop`: from a thread
- `call_at_end`: when a process has ended
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def call_in_thread(function: Callable[[], T], timeout_s: float | None) -> T:
    """Return what `function` returns in a thread of its own, which keeps no process from ending. `timeout_s`: None to
    wait for as long as it takes.

    Raises: TimeoutError; RuntimeError without a thread; whatever `function` raises
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        set_result: Callable[[], None]
        try:
            set_result = functools.partial(result.set_result, function())
        except Exception as error:
            set_result = functools.partial(result.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(lambda: None if result.done() else set_result())

    threading.Thread(target=run, name=getattr(function, "__name__", "call"), daemon=True).start()
    async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 forgets a cancellation that comes with the result
        return await result


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T], timeout_s: float) -> T:
    """Return what `function` returns in an event loop, which another thread than this one runs.

    Raises: TimeoutError; RuntimeError after the loop's end; whatever `function` raises
    """
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

    loop.call_soon_threadsafe(run)
    return result.result(timeout_s)


def call_at_end(pid: int, ended: Callable[[], object]) -> None:
    """Have the event loop call `ended` as soon as a process has ended.

    Raises: OSError, ProcessLookupError among them, for no such process, no free descriptor, or a kernel without pidfd
    """
    descriptor = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()

    def take() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        ended()

    loop.add_reader(descriptor, take)
