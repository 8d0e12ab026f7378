"""Network namespaces without names: file descriptors hold a namespace, and the kernel removes a namespace and its links
when the holders have ended. A reaper, a process in its own session, outlives this process and kills the remaining
processes in the namespaces.
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

from lab import LAB
from lab.cpu_quota import remove_cgroup
from megascale.core.errors import Exit, MegascaleError
from megascale.core.process import module_command

PRIVILEGES_HINT = "run as root; a container needs CAP_NET_ADMIN and CAP_SYS_ADMIN (--privileged)"

_DEATH_S = 10.0  # limit for the end of killed processes
_CLONE_NEWNET = 0x40000000  # flag of unshare(2) and setns(2)

T = TypeVar("T")


class TestbedError(MegascaleError):
    """A testbed that this machine cannot make, or a command that cannot run on a host."""

    exit_status = Exit.CONFIG


def new_namespace() -> int:
    """Make a network namespace and return a file descriptor that holds it.

    Raises: TestbedError
    """

    def make() -> int:
        _system_call("unshare", _CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    try:
        return _in_thread(make)
    except OSError as error:
        raise TestbedError(f"no network namespace can be made: {error.strerror}", hint=PRIVILEGES_HINT) from None


def call_in_namespace(namespace: int, call: Callable[[], T]) -> T:
    """Call `call` in a namespace and return its result."""

    def enter() -> T:
        _system_call("setns", namespace, _CLONE_NEWNET)
        return call()

    return _in_thread(enter)


def _in_thread(call: Callable[[], T]) -> T:
    """Call `call` in a new thread and return its result: a namespace belongs to a thread, and this thread keeps its."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def _system_call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def start_reaper(namespaces: Sequence[int], cgroups: Sequence[Path]) -> subprocess.Popen:
    """Start a process that kills the processes in the namespaces, and removes the control groups, when this process
    ends: the reaper's standard input then ends, too.
    """

    def start() -> subprocess.Popen:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))  # in this thread only
        return subprocess.Popen(
            module_command(__name__, *map(str, (*namespaces, *cgroups))),
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(LAB).parent)},
            pass_fds=namespaces,  # the reaper holds the namespaces: the kernel reuses the inode number of a removed one
            start_new_session=True,
        )

    return _in_thread(start)


def kill_processes_in(namespaces: Sequence[int]) -> None:
    """Kill all processes in the namespaces, and the processes that they start meanwhile.

    Raises: TestbedError if a process does not end
    """
    inodes = {os.fstat(fd).st_ino for fd in namespaces}
    deadline = time.monotonic() + _DEATH_S
    while pids := [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _namespace_of(pid) in inodes]:
        if time.monotonic() > deadline:
            raise TestbedError(f"processes {pids} do not end", hint="see what they wait for in /proc/PID/stack")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _namespace_of(pid: int) -> int | None:
    """Return the inode of a process's network namespace; None if the process has ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return None


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_processes_in([int(word) for word in sys.argv[1:] if word.isdecimal()])
    for word in sys.argv[1:]:
        if not word.isdecimal():
            remove_cgroup(Path(word))
