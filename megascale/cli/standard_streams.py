"""Standard streams that are closed, or whose disk is full."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Open the null device in place of closed standard streams: sockets and files would get their descriptors, and
    what a library prints would go there.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w"))


def discard_unwritable_output() -> bool:
    """Discard standard output if it takes no more, as on a full disk. Returns True if so."""
    try:
        print(flush=True)
    except OSError:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
        return True
    return False
