"""Lines of the driver and its supervisor for people."""

from __future__ import annotations

import contextlib
import sys


def print_line(text: str) -> None:
    """Print a line for people, if the terminal is still there."""
    with contextlib.suppress(OSError):
        print(f"megascale: {text}", file=sys.stderr, flush=True)
