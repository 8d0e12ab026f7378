"""Other processes of this host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
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

    before = {number: signal.signal(number, leave) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, `parent`, dies, whatever it dies of."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)
