"""Numbers on the command line, as argparse takes them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


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


def at_least(least: int, why: str) -> Callable[[str], int]:
    """Return an argument's type: a number of `least` or more, `why` in the error of one that is too small."""

    def read(text: str) -> int:
        if (number := count(text)) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is too few: {why}")
        return number

    return read


def counts(text: str) -> list[int]:
    """Numbers of 1 or more, with commas between them.

    Raises: argparse.ArgumentTypeError
    """
    return [count(part) for part in text.split(",")]


def positive(text: str) -> float:
    """A number above 0.

    Raises: argparse.ArgumentTypeError
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
