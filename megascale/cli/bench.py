"""`megascale bench`: measured numbers of this machine. Benchmarks start jobs of their own; this imports no torch."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from megascale.bench import overlap
from megascale.core.errors import Exit
from megascale.core.process import stopped_in_order


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    benchmarks = sub.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    help_line = "what overlap hides of communication, on a cluster of network namespaces (needs root)"
    one = benchmarks.add_parser("overlap", help=help_line, description=overlap.__doc__)
    names = list(overlap.CASES)
    one.add_argument("--axes", nargs="+", choices=names, default=names, metavar="AXIS", help=f"of {', '.join(names)}")
    one.add_argument("--rounds", type=_count, default=3, metavar="N", help="runs of each kind, in turns (3)")
    one.add_argument("--steps", type=_steps, default=8, metavar="N", help="steps of each run (8)")
    one.add_argument("--output", type=Path, metavar="DIR", help="keep the runs here, for `megascale trace`")
    one.add_argument("--json", action="store_true", help="print one JSON object")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _steps(text: str) -> int:
    if (count := _count(text)) <= overlap.WARM_UP:
        raise argparse.ArgumentTypeError(f"{text!r} is too few: the first {overlap.WARM_UP} steps do not count")
    return count


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    with stopped_in_order(), tempfile.TemporaryDirectory() as temporary:
        folder = (options.output or Path(temporary)).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise overlap.OverlapError(f"--output {folder}: {error.strerror}", mend="give another folder") from None
        cases = [overlap.CASES[name] for name in dict.fromkeys(options.axes)]
        results = [overlap.measure(case, folder, options.rounds, options.steps, overlap.progress) for case in cases]
    if options.json:
        more = [{"communication": r.communication, "ideal": r.ideal, "hidden": r.hidden} for r in results]
        print(json.dumps({"results": [asdict(r) | extra for r, extra in zip(results, more, strict=True)]}))
    else:
        print(overlap.table(results))
    return Exit.OK
