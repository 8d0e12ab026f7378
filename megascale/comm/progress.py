"""Works of torch.distributed that go on while the caller computes.

gloo moves data in threads of its own, but what follows an arrival (a sum, a second round of messages) needs someone to
wait for it. A thread for each channel does, in the order in which its communications were started, and notes when each
was done. On a GPU the streams do all of it.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue

import torch.distributed as dist

from megascale.comm.pending import Follow, Pending
from megascale.comm.timeout import Timeout
from megascale.device import Mark, StreamTimer, Timer


def follower(channel: str, timer: Timer, timeout: Timeout | None = None) -> Follow:
    """What follows the works of one channel, in which they are done in the order in which they were started.

    `timeout`: of gloo's messages, which keep to the one with which their group was opened unless each wait says
    otherwise. Collectives, and NCCL's works, follow the changes of their group's own.
    """
    if isinstance(timer, StreamTimer):
        return lambda works, finish: _OnStream(works, finish, timer, channel)
    progress = Progress(channel)
    return lambda works, finish: Messages(works, finish, progress, timeout)


class Messages:
    """Works of gloo, and what to do when they are done. Each is waited for as long as `timeout` says, else as its group
    does.
    """

    ended = None

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        finish: Callable[[], None] | None,
        progress: Progress,
        timeout: Timeout | None = None,
    ) -> None:
        self._works = works
        self._finish = finish
        self._progress = progress
        self._timeout = timeout

    def wait(self) -> None:
        limit = () if self._timeout is None else (self._timeout.now,)
        for work in self._works:
            if work is not None:
                work.wait(*limit)
        if self._finish is not None:
            self._finish()

    def in_background(self) -> Pending:
        return self._progress.follow(self)


class Followed:
    """A communication that a `Progress` follows. `wait` raises what happened to it."""

    __slots__ = ("_done", "_error", "_messages", "ended")

    def __init__(self, messages: Messages) -> None:
        self._messages: Messages | None = messages
        self._error: BaseException | None = None
        self._done = _thread.allocate_lock()  # a bare lock: an Event costs several times as much
        self._done.acquire()
        self.ended: float | None = None

    def wait(self) -> None:
        with self._done:
            pass
        if self._error is not None:
            raise self._error

    def in_background(self) -> Pending:
        return self

    def carry_out(self) -> None:
        """Wait for the messages, and let go of their tensors."""
        assert self._messages is not None, "a communication is carried out once"
        try:
            self._messages.wait()
        except BaseException as error:  # raised again by the thread that waits for it
            self._error = error
        self._messages = None
        if self._error is None:  # what has failed is never known to be done: who waits for it is told
            self.ended = time.perf_counter()
        self._done.release()


class Progress:
    """One channel's thread; it starts with the first communication and ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Followed] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def follow(self, messages: Messages) -> Followed:
        """Follow messages that have been started."""
        followed = Followed(messages)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(followed)
        return followed

    def _run(self) -> None:
        while True:
            self._queue.get().carry_out()


class _OnStream:
    """Works of NCCL: a wait is one of the current stream, and what follows is issued to it."""

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
        self.ended: Mark | None = None

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()

    def in_background(self) -> Pending:
        self.ended = self._timer.completion(self._works, self._channel)
        return self
