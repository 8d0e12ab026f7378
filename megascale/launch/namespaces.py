"""Network namespaces without names: open files hold them, so the kernel removes one, with all that is in it, when its
holders have ended. A keeper, a process in a session of its own, outlives whatever ends this one and kills what still
runs in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from megascale.core.errors import Exit, MegascaleError
from megascale.launch.cores import remove

PRIVILEGES = "run as root; in a container, in one that has CAP_NET_ADMIN and CAP_SYS_ADMIN (--privileged)"

_DEATH_S = 10.0  # in which a process that is killed ends
_CLONE_NEWNET = 0x40000000  # of unshare(2), setns(2)

T = TypeVar("T")


class TestbedError(MegascaleError):
    """A cluster that this machine cannot have, or a command that cannot be run on it."""

    exit_status = Exit.CONFIG


def new_namespace() -> int:
    """A file descriptor that holds a network namespace of its own.

    Raises: TestbedError
    """

    def make() -> int:
        _system_call("unshare", _CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    try:
        return _in_thread(make)
    except OSError as error:
        raise TestbedError(f"no network namespace can be made: {error.strerror}", mend=PRIVILEGES) from None


def inside(namespace: int, call: Callable[[], T]) -> T:
    """What `call` returns in a namespace."""

    def enter() -> T:
        _system_call("setns", namespace, _CLONE_NEWNET)
        return call()

    return _in_thread(enter)


def _in_thread(call: Callable[[], T]) -> T:
    """What `call` returns in a thread of its own: threads have namespaces, and this one keeps its."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def _system_call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def start_keeper(namespaces: Sequence[int], groups: Sequence[Path]) -> subprocess.Popen:
    """A process that kills what runs in the namespaces when this one ends: then its standard input does, too. It
    removes the control groups that are left.
    """

    def start() -> subprocess.Popen:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))  # of this thread
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, (*namespaces, *groups))],
            stdin=subprocess.PIPE,
            pass_fds=namespaces,  # it holds them: the number by which a namespace is known is soon used again
            start_new_session=True,
        )

    return _in_thread(start)


def kill_all_in(namespaces: Sequence[int]) -> None:
    """Kill all processes in some namespaces, and those that they start meanwhile.

    Raises: TestbedError if some do not end
    """
    inodes = {os.fstat(fd).st_ino for fd in namespaces}
    deadline = time.monotonic() + _DEATH_S
    while found := [
        pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _namespace_of(pid) in inodes
    ]:
        if time.monotonic() > deadline:
            raise TestbedError(f"processes {found} do not end", mend="see what they wait for in /proc/PID/stack")
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _namespace_of(pid: int) -> int | None:
    """The inode of a process's network namespace; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return None


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_all_in([int(word) for word in sys.argv[1:] if word.isdecimal()])
    for word in sys.argv[1:]:
        if not word.isdecimal():
            remove(Path(word))
