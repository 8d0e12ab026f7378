"""Remarks of commands about what they read or do: on standard error, apart from the answer."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def warn(notes: Iterable[str]) -> None:
    """Print a line for each note."""
    for note in notes:
        print(f"WARNING: {note}", file=sys.stderr)


def print_progress(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)
