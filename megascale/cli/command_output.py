"""Output of commands beside the answer: remarks and progress on standard error, and files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from megascale.core.errors import Exit, MegascaleError


class OutputError(MegascaleError):
    """A file that a command cannot write."""

    exit_status = Exit.CONFIG


def warn(notes: Iterable[str]) -> None:
    """Print a line for each note."""
    for note in notes:
        print(f"WARNING: {note}", file=sys.stderr)


def print_progress(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write a file in the block. Raises: OutputError if it cannot be written"""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}", hint="give another file") from None
