"""The files and tables of `megascale plan`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megascale.config.toml_writer import to_toml
from megascale.core.errors import ConfigError, Problem
from megascale.core.files import write_text
from megascale.operate.show import chrome_trace
from megascale.plan.search import plot
from megascale.plan.search.plan import Plan
from megascale.plan.search.timeline import events

WIDTH = 200  # width of the tables in columns if stdout is not a terminal


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Explain errors in the block, in which `path` is written or checked. Raises: ConfigError"""
    try:
        yield
    except OSError as error:
        message = f"cannot be written: {error.strerror}"
        raise ConfigError([Problem("command line", str(path), message, "give another file")]) from None


def write_files(options: argparse.Namespace, plan: Plan, sweep: list[Plan]) -> None:
    """Write the files of --timeline, --plot and --output. Raises: ConfigError"""
    if options.timeline:
        with writing(options.timeline):
            chrome_trace.write_trace(options.timeline, events(plan), 0.0)
    if options.plot:
        with writing(options.plot):
            plot.draw(options.plot, plan, sweep)
    if options.output:
        with writing(options.output):
            write_text(options.output, to_toml(plan.config))


def print_tables(parts: Iterable[str | Table]) -> None:
    """Print lines and tables, to the width of a terminal."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    for part in parts:
        console.print(part, markup=False)
