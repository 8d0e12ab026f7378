"""Measure the share of communication that overlap hides, on a cluster of network namespaces with slow links."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from lab import overlap
from megascale.cli.arguments import at_least, positive_int
from megascale.cli.command_output import print_progress
from megascale.core.errors import Exit
from megascale.core.files import write_text
from megascale.core.process import exit_on_stop_signals


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    names = list(overlap.CASES)
    one.add_argument(
        "--axes", nargs="+", choices=names, default=names, metavar="AXIS", help=f"any of {', '.join(names)}"
    )
    one.add_argument(
        "--rounds", type=positive_int, default=3, metavar="N", help="runs of each kind, alternating (default: 3)"
    )
    steps = at_least(overlap.WARM_UP_STEPS + 1, f"the first {overlap.WARM_UP_STEPS} steps are not timed")
    one.add_argument("--steps", type=steps, default=8, metavar="N", help="steps per run (default: 8)")
    one.add_argument("--output", type=Path, metavar="DIR", help="keep the runs here, with pictures of their last steps")
    one.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Measure the overlap of every axis in `--axes`."""
    with exit_on_stop_signals(), tempfile.TemporaryDirectory() as temporary:
        folder = (options.output or Path(temporary)).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise overlap.OverlapError(f"--output {folder}: {error.strerror}", hint="give a writable folder") from None
        cases = [overlap.CASES[name] for name in dict.fromkeys(options.axes)]
        results = [
            result
            for case in cases
            for result in overlap.measure_overlap(case, folder, options.rounds, options.steps, print_progress)
        ]
        for case in cases if options.output else ():
            write_text(folder / f"overlap-{case.name}.svg", overlap.overlap_picture(folder, case, options.steps))
    if options.json:
        derived = [{"communication": r.communication, "ideal": r.ideal, "hidden": r.hidden} for r in results]
        print(json.dumps({"results": [asdict(r) | extra for r, extra in zip(results, derived, strict=True)]}))
    else:
        print(overlap.table(results))
    return Exit.OK
