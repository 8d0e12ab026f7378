"""Measure how long a job of many ranks takes to start."""

from __future__ import annotations

import argparse
import json

from lab import startup
from megascale.cli.arguments import at_least, positive_int
from megascale.cli.command_output import print_progress
from megascale.core.errors import Exit
from megascale.core.limits import raise_soft_limits
from megascale.core.process import exit_on_stop_signals

OPEN_FILES = 1 << 16
"""Open files that a benchmark of many ranks asks for: gloo connects each rank with all others."""


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    several = at_least(2, "a job has two ranks or more")
    one.add_argument(
        "--clients", type=positive_int, nargs="+", default=[1, 16, 128], metavar="N", help="clients of a store at once "
        "(default: 1 16 128)",
    )  # fmt: skip
    one.add_argument(
        "--ranks", type=several, nargs="+", default=[8, 32, 128], metavar="N", help="ranks that open groups at once, "
        "forked on this host (default: 8 32 128)",
    )  # fmt: skip
    one.add_argument(
        "--seconds", type=float, default=3.0, metavar="S", help="time of each measurement of a store (default: 3)"
    )
    one.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Measure all parts of a start, and print them beside the paper's."""
    raise_soft_limits(OPEN_FILES)
    with exit_on_stop_signals():
        measured = startup.measure_startup(options.clients, options.ranks, options.seconds, print_progress)
    print(json.dumps(startup.as_json(measured)) if options.json else startup.table(measured))
    return Exit.OK
