"""`megascale bench startup`: how long a job of many ranks takes to start."""

from __future__ import annotations

import argparse
import json
from typing import Any

from megascale.bench.overlap import print_progress
from megascale.cli.argument_types import at_least, positive_int
from megascale.core.limits import raise_soft_limits

OPEN_FILES = 1 << 16
"""Open files that a benchmark of many ranks asks for: gloo connects each rank with all others."""


def add_startup(benchmarks: Any) -> None:
    """Declare the arguments of `bench startup`."""
    help_line = "measure what a start consists of: processes, imports, the job's store, and the opening of groups"
    one = benchmarks.add_parser("startup", help=help_line, description=f"{help_line[0].upper()}{help_line[1:]}.")
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


def run_startup(options: argparse.Namespace) -> None:
    """Measure all parts of a start, and print them beside the paper's."""
    from megascale.bench import startup

    raise_soft_limits(OPEN_FILES)
    measured = startup.measure_startup(options.clients, options.ranks, options.seconds, print_progress)
    print(json.dumps(startup.as_json(measured)) if options.json else startup.table(measured))
