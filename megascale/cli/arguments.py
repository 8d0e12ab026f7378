"""Arguments that several commands share, and the types of arguments: bounded numbers, lists, ranges, files to write."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megascale.core.files import is_file

T = TypeVar("T")


def add_config_arguments(sub: argparse.ArgumentParser, optional: str = "") -> None:
    """Declare CONFIG and key=value, the arguments of every command that reads a run's configuration. `optional`: the
    default of CONFIG.
    """
    config = f"a run's TOML file (default: {optional})" if optional else "the run's TOML file"
    sub.add_argument("config", metavar="CONFIG", nargs="?" if optional else None, help=config)
    setting = "override a setting of the file, as section.key=value"
    sub.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=setting)


def add_run(sub: argparse.ArgumentParser, help_line: str = "the run's folder") -> None:
    """Declare RUN, a path or a URL. Who reads it raises `core.named_run.no_run` where there is no run."""
    sub.add_argument("run", metavar="RUN", help=help_line)


def add_json(sub: argparse._ActionsContainer) -> None:
    """Declare --json."""
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def checked(what: str, read: Callable[[str], T], holds: Callable[[T], bool] = lambda value: True) -> Callable[[str], T]:
    """Return an argument type: what `read` makes of a text, where it `holds`. For any other text, and if `read` raises
    ValueError, the error says that it is not `what`.
    """

    def parse(text: str) -> T:
        with contextlib.suppress(ValueError):
            if holds(value := read(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return parse


def read_digits(text: str) -> int:
    """Read an integer without sign, space or underscore. Raises: ValueError"""
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


non_negative_int = checked("an integer of 0 or more", read_digits)
positive_int = checked("an integer of 1 or more", read_digits, lambda number: number > 0)
positive_float = checked("a number above 0", float, lambda number: 0 < number < math.inf)


def at_least(least: int, why: str) -> Callable[[str], int]:
    """Return an argument type: an integer of `least` or more. The error for a smaller integer states `why`."""

    def read(text: str) -> int:
        if (number := positive_int(text)) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is too small: {why}")
        return number

    return read


def positive_ints(text: str) -> list[int]:
    """Parse a comma-separated list of integers of 1 or more. Raises: argparse.ArgumentTypeError"""
    return [positive_int(part) for part in text.split(",")]


def float_within(least: float, most: float, why: str) -> Callable[[str], float]:
    """Return an argument type: a float from `least` to `most`. The error for another number states `why`."""

    def read(text: str) -> float:
        if not least <= (value := positive_float(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not from {least:g} to {most:g}: {why}")
        return value

    return read


def _span(text: str, sign: str) -> range:
    """Parse 'A', or 'A' and 'B' with `sign` between them, both included. Raises: ValueError"""
    first, _, last = text.partition(sign)
    if not re.fullmatch(rf"\d+({sign}\d+)?", text, re.ASCII) or int(last or first) < int(first):
        raise ValueError(text)
    return range(int(first), int(last or first) + 1)


step_range = checked("a range of steps: A:B with A not above B, or A alone", lambda text: _span(text, ":"))
rank_ranges = checked(
    "a list of ranks such as 0,1,4-7", lambda text: [_span(word, "-") for word in text.split(",")]
)  # fmt: skip


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
