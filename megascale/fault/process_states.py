"""The state of a process as the kernel shows it, also of one that is stopped or hung; and its stack, by py-spy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

STACK_S = 5.0
"""Seconds in which py-spy must return the stack of a process."""

MAX_STACK_CHARACTERS = 20_000

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STOPPED = ("T", "t")


@dataclass(frozen=True)
class ProcessState:
    """`state`: R (runs), S (sleeps), D (waits for a disk or file server), T or t (stopped), Z (has ended); "" for a
    process that is gone. `rss`: bytes.
    """

    state: str = ""
    rss: int = 0

    @property
    def is_stopped(self) -> bool:
        """True for a process stopped by a signal or a debugger."""
        return self.state in _STOPPED


def process_state(pid: int) -> ProcessState:
    """Return the state of a process's main thread."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ProcessState()
    fields = text.rpartition(")")[2].split()
    return ProcessState(fields[0], int(fields[21]) * _PAGE_BYTES)


def stack_of(pid: int, timeout_s: float = STACK_S) -> str:
    """Return the stacks of a process's threads, or why there are none. Does not stop the process: a stopped one, or one
    in uninterruptible sleep, would not answer.
    """
    command = [find_py_spy(), "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"py-spy: no stack of process {pid} within {timeout_s:g} s"
    except OSError as error:
        return f"py-spy: {error.strerror}: {error.filename}"
    return (done.stdout or f"py-spy: {done.stderr.strip()}")[:MAX_STACK_CHARACTERS]


def find_py_spy() -> str:
    """Return the path of py-spy: beside this Python, else that of PATH."""
    own = Path(sys.executable).parent / "py-spy"
    return str(own) if own.exists() else shutil.which("py-spy") or "py-spy"
