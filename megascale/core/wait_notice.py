"""Notices of a long wait: a process that waits for others says so after FIRST_S, then every NEXT_S seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

FIRST_S = 10.0
NEXT_S = 30.0


class WaitNotice:
    """The notices of a wait that polls. `who`: the waiting process, such as "rank 1 of 2 on node7"."""

    def __init__(self, who: object) -> None:
        self._who = who
        self._start = time.monotonic()
        self._next_s = FIRST_S

    @property
    def waited_s(self) -> float:
        """Seconds since the start of the wait."""
        return time.monotonic() - self._start

    @property
    def due_in_s(self) -> float:
        """Seconds until the next notice."""
        return max(0.0, self._next_s - self.waited_s)

    def print_if_due(self, awaited: Callable[[], str]) -> None:
        """Print a notice on stderr, if one is due. `awaited`: called only then, to say for what the process waits."""
        waited = self.waited_s
        if waited < self._next_s:
            return
        self._next_s = waited + NEXT_S
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            print(f"{self._who}: has waited {waited:.0f} s for {awaited()}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def wait_notices(who: object, awaited: str) -> Iterator[None]:
    """Print notices while the block waits in C++, from a thread."""
    ended = threading.Event()
    notice = WaitNotice(who)

    def run() -> None:
        while not ended.wait(notice.due_in_s):
            notice.print_if_due(lambda: awaited)

    thread = threading.Thread(target=run, name="wait notices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
