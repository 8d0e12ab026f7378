"""Processes of this host: signals that stop a run, usable cores, garbage collection, parent death."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType

from megascale.core.limits import cpu_quota

STOP_ORDER = signal.SIGRTMIN + 3
"""The signal by which a parent of this job orders its child to stop. Nobody else sends it: a SIGTERM may come from
anyone, and of one that goes to a whole group of processes each has a delivery of its own.
"""

ORDER_WAIT_S = 5.0
"""Seconds that a process with a parent of this job waits for an order after a stop signal of its own: the parent may
have got the signal too, and decides.
"""

REQUEST_S = 2.0  # seconds in which further stop signals belong to the same request

_SET_PDEATHSIG = 1  # of prctl(2)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LIBC = ctypes.CDLL(None)  # loaded here: a child of a process with threads must not load a library
_PRCTL, _SIGNAL = _LIBC.prctl, _LIBC.signal


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a new interpreter of the kind of this one.

    The child imports from the current folder only if this process does. `python -m` alone always would, before Python's
    own library: whoever can write into the folder in which a job is started could run code as its owner.
    """
    current = {""}
    with contextlib.suppress(OSError):  # it was removed
        current.add(str(Path.cwd()))
    return [sys.executable, *([] if current.intersection(sys.path) else ["-P"]), "-m", module, *arguments]


def process_exists(pid: int) -> bool:
    """Return True if a process with this id runs, whoever owns it; False for one that has ended and that its parent has
    not waited for.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return process_state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # no /proc
        return True


def process_state(pid: int) -> str:
    """Return the letter of a process's state in /proc, such as "T" for stopped. Raises: OSError without the process"""
    return _stat(f"{pid}")[0]


def _stat(process: str) -> list[str]:
    """Return the fields of proc_pid_stat(5) from the third on, the state. Raises: OSError without the process"""
    stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    return stat.rpartition(")")[2].split()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process so far, 0 for a process that is gone."""
    try:
        user, system = _stat(f"{pid}")[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / _TICKS_PER_S


def status_of_ended(pid: int) -> int | None:
    """Return the exit status of a process, negative for a signal, that its parent has not waited for yet. None if it
    runs, is gone, or belongs to another user.
    """
    with contextlib.suppress(OSError, IndexError):
        fields = _stat(f"{pid}")
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[49]))
    return None


def thread_work(pid: int, thread: int) -> tuple[int, ...]:
    """Return numbers that grow while a thread works or polls, and not while it is blocked: its ticks on a core, and how
    often it has waited. Empty for a thread that is gone.
    """
    folder = f"{pid}/task/{thread}"
    try:
        user, system = _stat(folder)[11:13]
        status = Path(f"/proc/{folder}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    waits = re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)  # some kernels do not count them
    return int(user) + int(system), *map(int, waits)


def process_facts(pid: int) -> tuple[str, int]:
    """Return the letter of a process's state and its resident bytes; "" and 0 for a process that is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
        return process_state(pid), int(pages) * _PAGE_BYTES
    except OSError:
        return "", 0


def usable_cores(pids: Iterable[int] = (0,)) -> int:
    """Count the cores that processes may keep busy together, by default this one, by their CPU affinity and the quota
    of its control groups; a job may own only part of the host.
    """
    allowed = set[int]()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            allowed |= os.sched_getaffinity(pid)
    allowed = allowed or os.sched_getaffinity(0)  # the processes have ended
    return max(1, int(min(len(allowed), cpu_quota())))  # a core more would pause all threads for a part of each period


def stop_signals() -> list[signal.Signals]:
    """The signals that stop a run: SIGTERM, SIGINT, and SIGHUP unless nohup ignores the hang-up."""
    handles_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if handles_hangup else [])]


class StopRequests:
    """The number of requests to stop, and the signal of the first, 0 before. One request may have several deliveries: a
    shell and the kernel both send a SIGHUP, and torchrun forwards a signal that its ranks have got, too.
    """

    def __init__(self) -> None:
        self.count = self.first = 0
        self._since = -math.inf

    def add(self, number: int, now: float) -> bool:
        """Count a delivery of a signal at `now`, in seconds, and return True if it is a new request."""
        if now - self._since < REQUEST_S:
            return False
        self.count, self.first, self._since = self.count + 1, self.first or number, now
        return True


def exit_on_stop_signals() -> AbstractContextManager[None]:
    """Raise SystemExit(128 + signal number), as a shell reports, on a stop signal in the block, to close open files."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    return handling_stops(leave)


def interrupt_on_stop_signals() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt on a stop signal in the block: the ordinary end of what runs until then."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return handling_stops(leave)


@contextlib.contextmanager
def handling_stops(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Install `handler` for all stop signals while the block runs."""
    previous = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)


@contextlib.contextmanager
def blocking_stops() -> Iterator[None]:
    """Block stop signals in this thread while the block runs, and in processes that it starts until `ignore_stops`."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ignore_stops() -> None:
    """Ignore stop signals, also those that came while this process started, with `blocking_stops`."""
    numbers = stop_signals()
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection in the block: scanning millions of live objects takes up to a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def imports_to_keep() -> Iterator[None]:
    """Collect no garbage while a block imports, and later none of what it imported: torch alone has 160,000 objects."""
    with without_gc():
        yield
    gc.freeze()


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies for any reason."""
    _PRCTL(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def end_by_signal(number: int) -> None:
    """End this process by the default action of a signal, from any thread: Python's own call is for the main thread."""
    _SIGNAL(number, None)
    os.kill(os.getpid(), number)
