"""This process, and others of its host."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

_SET_PDEATHSIG = 1  # of prctl(2)


def runs(pid: int) -> bool:
    """Whether there is a process of this number, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def usable_cores() -> int:
    """Count the cores that this process may use, fewer than the host's in a job with a share of it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a run to stop. A terminal that hangs up is one, unless nohup had it ignored."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else [])]


@contextlib.contextmanager
def stopped_in_order() -> Iterator[None]:
    """While the block runs, a signal that asks to stop is a SystemExit with a shell's status, 128 and its number: what
    has been opened is closed.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    with handling_stops(leave):
        yield


@contextlib.contextmanager
def handling_stops(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `handler` for each signal that asks to stop while the block runs."""
    before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection while the block runs: looking through millions of objects that are all in use takes up
    to a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, `parent`, dies, whatever it dies of."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)
