"""Handles of communication in flight: `TransportWork` from a transport, `Work` for the caller of a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch.distributed as dist

from megascale.device import Mark


class TransportWork(Protocol):
    """A transport's communication. After `wait` its output may be read and its input written, on this rank's stream.

    `completed_at`: end of the communication; None if only the end of `wait` is known.
    """

    @property
    def completed_at(self) -> Mark | None: ...

    def wait(self) -> object: ...

    def in_background(self) -> TransportWork:
        """Continue the communication while the caller computes, and return the work to wait for."""
        return self


class Work(Protocol):
    """A started communication, as its caller sees it."""

    def wait(self) -> object: ...


class _Done(TransportWork):
    completed_at = None

    def wait(self) -> None:
        return None


COMPLETED: TransportWork = _Done()  # the work of a group of one rank: nothing to wait for


class LostWork(TransportWork):
    """A communication that counts as complete at once, and sends nothing: an injected fault."""

    def __init__(self, completed_at: Mark) -> None:
        self._completed_at = completed_at

    @property
    def completed_at(self) -> Mark | None:
        return self._completed_at

    def wait(self) -> None:
        return None


class LateWork(TransportWork):
    """A communication that another thread starts: an injected fault."""

    def __init__(self, started: Future[TransportWork]) -> None:
        self._started = started

    @property
    def completed_at(self) -> Mark | None:
        return self._started.result().completed_at if self._started.done() else None

    def wait(self) -> object:
        return self._started.result().wait()


WrapWork = Callable[[Sequence[dist.Work | None], Callable[[], None] | None], TransportWork]
"""Function (works of torch.distributed, callback at their end or None): return a `TransportWork`."""
