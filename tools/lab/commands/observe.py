"""Slow synthetic and real jobs down, and count how often the findings about them are right."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lab import observe
from lab.observe import Judgement
from lab.observe_jobs import SLOWDOWNS, judge_job
from megascale.cli.arguments import non_negative_int
from megascale.cli.command_output import print_progress
from megascale.core.errors import Exit
from megascale.core.files import write_text
from megascale.core.process import exit_on_stop_signals

CASES = 160
"""Synthetic jobs by default: 20 of each kind."""


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    cases = f"synthetic jobs of 8 to 64 ranks, the kinds of slowdowns in turn (default: {CASES})"
    one.add_argument("--cases", type=non_negative_int, default=CASES, metavar="N", help=cases)
    one.add_argument("--large", type=non_negative_int, default=0, metavar="N", help="synthetic jobs of 12,288 ranks")
    one.add_argument("--jobs", type=non_negative_int, default=0, metavar="N", help="real jobs of each kind")
    kinds = "kinds of real jobs, by words of their names, separated by commas (default: all)"
    one.add_argument("--kinds", default="", metavar="WORDS", help=kinds)
    one.add_argument("--seed", type=non_negative_int, default=1, metavar="N", help="of the slowdowns (default: 1)")
    one.add_argument("--output", type=Path, metavar="FOLDER", help="folder of real jobs; those there are judged anew")
    one.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file")
    one.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status: 0 if 95% of the slowdowns are right, and no healthy job is called
    slow.
    """
    with exit_on_stop_signals():
        judged = {"synthetic jobs": observe.judge_all(
            list(observe.synthetic_cases(options.cases, options.large, options.seed)), print_progress)}  # fmt: skip
        judged["real jobs of 4 and 8 ranks"] = list(_judge_jobs(options))
    judged = {name: judgements for name, judgements in judged.items() if judgements}
    lines = [line for name, judgements in judged.items() for line in
             (f"{name}: {observe.summary(judgements)}", "", *observe.table(judgements), "")]  # fmt: skip
    if options.markdown:
        write_text(options.markdown, "\n".join(lines))
    results = {name: [one.to_dict() for one in judgements] for name, judgements in judged.items()}
    print(json.dumps(results) if options.json else "\n".join(lines[:-1]))
    return Exit.OK if all(map(observe.is_good, judged.values())) else Exit.UNCLASSIFIED


def _judge_jobs(options: argparse.Namespace) -> Iterator[Judgement]:
    """Run the real jobs, and say of each what was found."""
    with tempfile.TemporaryDirectory(prefix="megascale-observe-") as scratch:
        folder = (options.output or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(options.seed, options.seed + options.jobs):
            for kind in (kind for kind in SLOWDOWNS if any(word in kind for word in options.kinds.split(","))):
                yield (one := judge_job(kind, number, folder))
                print_progress(f"{kind} {number}: {'right' if one.right else 'wrong'}: {observe.describe(one)}")
