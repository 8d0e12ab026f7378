"""Communication under way: what a transport returns, and what its caller waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist

from megascale.device import Mark


class Pending(Protocol):
    """After `wait` the output of a communication may be read and its input written, on this rank's stream.

    `ended`: when it was done, None where that is known from the end of `wait` only.
    """

    @property
    def ended(self) -> Mark | None: ...

    def wait(self) -> object: ...

    def in_background(self) -> Pending:
        """Let it go on while the caller computes. Returns what to wait for, by default itself."""
        return self


class Awaitable(Protocol):
    """All that a caller needs to know of a communication that it has started."""

    def wait(self) -> object: ...


class _Done(Pending):
    ended = None

    def wait(self) -> None:
        return None


DONE: Pending = _Done()
"""Communication that needed none."""

Follow = Callable[[Sequence[dist.Work | None], Callable[[], None] | None], Pending]
"""From works of torch.distributed, and what to do once they are done, to a `Pending`."""
