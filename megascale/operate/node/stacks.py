"""Stacks of processes by py-spy, also of one that is stopped, hangs or holds Python's lock."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from megascale.core.files import exists

STACK_S = 5.0  # seconds in which py-spy must return the stack of a process

MAX_STACK_CHARACTERS = 20_000


def stack_of(pid: int, timeout_s: float = STACK_S) -> str:
    """Return the stacks of a process's threads, or why there are none. Does not stop the process: a stopped one, or one
    in uninterruptible sleep, would not answer.
    """
    own = Path(sys.executable).parent / "py-spy"
    program = str(own) if exists(own, optional=True) else shutil.which("py-spy") or "py-spy"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"py-spy: no stack of process {pid} within {timeout_s:g} s"
    except OSError as error:
        return f"py-spy: {error.strerror}: {error.filename}"
    return (done.stdout or f"py-spy: {done.stderr.strip()}")[:MAX_STACK_CHARACTERS]
