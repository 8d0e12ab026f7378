"""Numbers on the command line, as argparse takes them."""

from __future__ import annotations

import argparse


def whole(text: str) -> int:
    """A number of 0 or more.

    Raises: argparse.ArgumentTypeError
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def count(text: str) -> int:
    """A number of 1 or more.

    Raises: argparse.ArgumentTypeError
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)
