"""Types of command-line arguments for argparse: bounded integers and floats, lists, ranges, and files to write."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

from megascale.core.files import is_file


def non_negative_int(text: str) -> int:
    """Parse an integer of 0 or more.

    Raises: argparse.ArgumentTypeError
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 0 or more")
    return int(text)


def positive_int(text: str) -> int:
    """Parse an integer of 1 or more.

    Raises: argparse.ArgumentTypeError
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)


def at_least(least: int, why: str) -> Callable[[str], int]:
    """Return an argument type: an integer of `least` or more. The error for a smaller integer states `why`."""

    def read(text: str) -> int:
        if (number := positive_int(text)) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is too small: {why}")
        return number

    return read


def positive_ints(text: str) -> list[int]:
    """Parse a comma-separated list of integers of 1 or more.

    Raises: argparse.ArgumentTypeError
    """
    return [positive_int(part) for part in text.split(",")]


def positive_float(text: str) -> float:
    """Parse a finite float above 0.

    Raises: argparse.ArgumentTypeError
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def float_within(least: float, most: float, why: str) -> Callable[[str], float]:
    """Return an argument type: a float from `least` to `most`. The error for another number states `why`."""

    def read(text: str) -> float:
        if not least <= (value := positive_float(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not from {least:g} to {most:g}: {why}")
        return value

    return read


def step_range(text: str) -> range:
    """Parse steps: A:B, both included, or A alone. Raises: argparse.ArgumentTypeError"""
    if (steps := _span(text, ":")) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps: A:B with A not above B, or A alone")
    return steps


def rank_ranges(text: str) -> list[range]:
    """Parse a list of ranks such as 0,1,4-7. Raises: argparse.ArgumentTypeError"""
    spans = [_span(word, "-") for word in text.split(",")]
    if None in spans:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,1,4-7")
    return [span for span in spans if span is not None]


def _span(text: str, sign: str) -> range | None:
    """Parse 'A', or 'A' and 'B' with `sign` between them, both included; None for anything else."""
    first, _, last = text.partition(sign)
    if not re.fullmatch(rf"\d+({sign}\d+)?", text, re.ASCII) or int(last or first) < int(first):
        return None
    return range(int(first), int(last or first) + 1)


def local_path(text: str) -> Path:
    """Parse the path of output files, which are written to a file system of this host.

    Raises: argparse.ArgumentTypeError for a URL
    """
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is a URL: give a path of this host, and copy the files afterwards")
    return Path(text)


def own_file(suffix: str, start: bytes) -> Callable[[str], Path]:
    """Return an argument type: an output path that is new, or a file that this command wrote before. `start`: the first
    bytes of such a file.
    """

    def path(text: str) -> Path:
        if not text.endswith(suffix):
            raise argparse.ArgumentTypeError(f"{text!r} does not end in {suffix}")
        output = Path(text)
        if is_file(output):
            with open(output, "rb") as file:
                found = file.read(len(start))
            if found and found != start:
                raise argparse.ArgumentTypeError(f"{text!r} exists and was not written by this command")
        return output

    return path
