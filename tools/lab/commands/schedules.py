"""Seconds of a step by pipeline schedule, in turn, on a cluster of network namespaces with slow links."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from lab.overlap import WARM_UP_STEPS, OverlapCase, OverlapJob, batch_keys, model_keys
from lab.testbed import HostLink, Testbed
from megascale.cli.arguments import at_least, positive_int
from megascale.cli.command_output import print_progress
from megascale.core.errors import Exit
from megascale.core.process import exit_on_stop_signals

CASES = {
    case.name: (case, HostLink(mbit * 1e6))
    for mbit, case in (
        (400, OverlapCase(
            "dense", 2, ("pp",),
            model_keys(8, 512, 2048) | batch_keys(4, 8) | {"parallel.pp": "2", "parallel.vpp": "2"},
            cores=0.5,
            schedules=("interleaved_1f1b", "interleaved_zb", "zb_v"),
        )),
        (100, OverlapCase(
            "experts", 8, ("ep",),
            model_keys(8, 256, 768) | batch_keys(2, 32)
            | {"parallel.pp": "4", "parallel.vpp": "2", "parallel.dp": "2", "parallel.ep": "2"}
            | {"model.experts": "8", "model.experts_per_token": "2", "model.expert_ffn_size": "512"},
            cores=0.22,
            schedules=("interleaved_1f1b", "combined_1f1b", "dualpipev"),
        )),
    )
}  # fmt: skip
"""Jobs whose bubble in interleaved 1F1B is 20% and 16%, with 2 and 8 micro-batches, and their links."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("cases", nargs="+", choices=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument(
        "--rounds", type=positive_int, default=3, metavar="N", help="runs of each schedule (default: 3)"
    )
    steps = at_least(WARM_UP_STEPS + 1, f"the first {WARM_UP_STEPS} steps are not timed")
    parser.add_argument("--steps", type=steps, default=6, metavar="N", help="steps per run (default: 6)")


def run(options: argparse.Namespace) -> int:
    """Print a table: medians over the rounds, and how much faster than the first schedule."""
    print("| job | schedule | s a step | speed-up |\n|---|---|---:|---:|")
    with exit_on_stop_signals():
        for case, link in (CASES[name] for name in options.cases):
            medians = _measure(case, link, options.rounds, options.steps)
            for schedule, median in medians.items():
                ratio = medians[case.schedules[0]] / median
                print(f"| {case.name} | `{schedule}` | {median:.2f} | {ratio:.2f} |", flush=True)
    return Exit.OK


def _measure(case: OverlapCase, link: HostLink, rounds: int, steps: int) -> dict[str, float]:
    times: dict[str, list[float]] = {schedule: [] for schedule in case.schedules}
    with tempfile.TemporaryDirectory() as folder, Testbed(case.hosts, link, case.cores) as testbed:
        job = OverlapJob(testbed, case, Path(folder), steps)
        for number in range(rounds):
            for schedule, seconds in times.items():
                seconds.append(job.measure_step(schedule)[0])
                print_progress(f"round {number + 1}/{rounds}: {schedule} {seconds[-1]:.3f} s a step")
    return {schedule: statistics.median(seconds) for schedule, seconds in times.items()}
