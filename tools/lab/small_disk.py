"""A small file system in memory, for checkpoints that find their disk full."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lab.namespaces import TestbedError

FILLER = "filler"
"""The file that fills a disk."""

_PARTS = 1 << 20, 4096


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Mount a new file system of `size` bytes at `folder`, which is made, and unmount it at the end, if it still is.

    Raises: TestbedError without the privilege
    """
    folder.mkdir(parents=True)
    _call("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield
    finally:
        if os.path.ismount(folder):
            _call("umount", str(folder))


def fill_disk(folder: Path) -> None:
    """Fill the file system at `folder`. Raises: ValueError if it is not one of its own, but part of a host's disk"""
    if not os.path.ismount(folder):
        raise ValueError(f"{folder} is no file system of its own")
    with open(folder / FILLER, "wb", buffering=0) as file:
        for size in _PARTS:
            try:
                while file.write(bytes(size)):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def empty_disk(folder: Path) -> None:
    """Remove what `fill_disk` has written."""
    (folder / FILLER).unlink(missing_ok=True)


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise TestbedError(f"{command[0]}: no such program", hint="install the package mount") from error
    except subprocess.CalledProcessError as error:
        what = f"{command[0]} of {command[-1]}: {error.stderr.strip()}"
        raise TestbedError(what, hint="run as root; a container needs CAP_SYS_ADMIN (--privileged)") from error
