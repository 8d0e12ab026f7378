"""Other processes of this host."""

from __future__ import annotations

import ctypes
import os
import signal

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


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, `parent`, dies, whatever it dies of."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)
