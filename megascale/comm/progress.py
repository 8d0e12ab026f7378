"""Progress of torch.distributed's works while the caller computes.

gloo moves data in its own threads, but a caller has to wait for arrivals before the next part of a collective (a sum, a
second round of messages). A progress thread per channel does, in the order of the starts, and notes the completion
times. On a GPU streams do this work.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue

import torch
import torch.distributed as dist

from megascale.comm.timeout import Timeout
from megascale.comm.work import TransportWork, WrapWork
from megascale.core.errors import LostPeerError
from megascale.device import Mark, StreamTimer
from megascale.record.recorder import Timer


def work_wrapper(channel: str, timer: Timer, timeout: Timeout | None = None) -> WrapWork:
    """Return a `WrapWork` for a channel: works that complete in the order of their starts.

    `timeout`: for gloo's messages, which keep the timeout at the opening of their group unless a wait passes another.
    Collectives and NCCL's works follow changes of their group's timeout.
    """
    if isinstance(timer, StreamTimer):
        return lambda works, finish: _StreamWork(works, finish, timer, channel)
    progress = ProgressThread(channel)
    return lambda works, finish: GlooWork(works, finish, progress, timeout)


class GlooWork:
    """Works of gloo, and `on_complete` to call after them. The timeout of a wait is `timeout`, else the group's."""

    completed_at = None

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        on_complete: Callable[[], None] | None,
        progress: ProgressThread,
        timeout: Timeout | None = None,
    ) -> None:
        self._works = works
        self._on_complete = on_complete
        self._progress = progress
        self._timeout = timeout

    def wait(self) -> None:
        limit = () if self._timeout is None else (self._timeout.current,)
        for work in self._works:
            if work is not None:
                try:
                    work.wait(*limit)
                except RuntimeError as error:  # gloo's errors have no type of their own
                    raise LostPeerError(str(error).strip()) from error
        if self._on_complete is not None:
            self._on_complete()

    def in_background(self) -> TransportWork:
        return self._progress.submit(self)


class BackgroundWork:
    """A communication on a `ProgressThread`. `wait` raises the communication's error."""

    __slots__ = ("_done", "_error", "_work", "completed_at")

    def __init__(self, work: GlooWork) -> None:
        self._work: GlooWork | None = work
        self._error: BaseException | None = None
        self._done = _thread.allocate_lock()  # a bare lock: an Event costs several times as much
        self._done.acquire()
        self.completed_at: float | None = None

    def wait(self) -> None:
        with self._done:
            pass
        if self._error is not None:
            raise self._error

    def in_background(self) -> TransportWork:
        return self

    def complete(self) -> None:
        """Wait for the messages, and release their tensors."""
        assert self._work is not None, "a BackgroundWork is completed once"
        try:
            self._work.wait()
        except BaseException as error:  # raised by `wait` in the waiting thread
            self._error = error
        self._work = None
        if self._error is None:  # a failed communication never completes, so that its caller waits and gets the error
            self.completed_at = time.perf_counter()
        self._done.release()


class ProgressThread:
    """The thread of a channel. It starts with the first communication and ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[BackgroundWork] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: GlooWork) -> BackgroundWork:
        """Complete a started communication in the background."""
        background = BackgroundWork(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(background)
        return background

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # in this thread: results in flight may be known to autograd already
        while True:
            self._queue.get().complete()


class _StreamWork:
    """Works of NCCL: `wait` makes the current stream wait, then issues `finish` on the stream."""

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        finish: Callable[[], None] | None,
        timer: StreamTimer,
        channel: Hashable,
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._finish = finish
        self._timer = timer
        self._channel = channel
        self.completed_at: Mark | None = None

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()

    def in_background(self) -> TransportWork:
        self.completed_at = self._timer.completion_mark(self._works, self._channel)
        return self
