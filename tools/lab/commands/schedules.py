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

PIPELINE = {"parallel.pp": "2", "parallel.vpp": "2"}

CASES = {
    "dense": OverlapCase(
        "dense", 2, ("pp",),
        model_keys(8, 512, 2048) | batch_keys(4, 8) | PIPELINE,
        cores=0.5,
        schedules=("interleaved_1f1b", "interleaved_zb", "zb_v"),
    ),
    "experts": OverlapCase(
        "experts", 4, ("ep",),
        model_keys(8, 256, 768) | batch_keys(2, 16) | PIPELINE
        | {"parallel.dp": "2", "parallel.ep": "2"}
        | {"model.experts": "8", "model.experts_per_token": "2", "model.expert_ffn_size": "512"},
        cores=0.4,
        schedules=("interleaved_1f1b", "combined_1f1b", "dualpipev"),
    ),
}  # fmt: skip
"""Jobs with a bubble of 20% and 11% in interleaved 1F1B, of 2 and 4 micro-batches."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("case", choices=list(CASES), metavar="CASE", help=f"one of {', '.join(CASES)}")
    parser.add_argument("--mbit", type=positive_int, default=200, metavar="N", help="Mbit/s of links (default: 200)")
    parser.add_argument(
        "--rounds", type=positive_int, default=3, metavar="N", help="runs of each schedule (default: 3)"
    )
    steps = at_least(WARM_UP_STEPS + 1, f"the first {WARM_UP_STEPS} steps are not timed")
    parser.add_argument("--steps", type=steps, default=6, metavar="N", help="steps per run (default: 6)")


def run(options: argparse.Namespace) -> int:
    """Print the table of a case: medians over the rounds."""
    case = CASES[options.case]
    times: dict[str, list[float]] = {schedule: [] for schedule in case.schedules}
    with (
        exit_on_stop_signals(),
        tempfile.TemporaryDirectory() as folder,
        Testbed(case.hosts, HostLink(options.mbit * 1e6), case.cores) as testbed,
    ):
        job = OverlapJob(testbed, case, Path(folder), options.steps)
        for number in range(options.rounds):
            for schedule, seconds in times.items():
                seconds.append(job.measure_step(schedule)[0])
                print_progress(f"round {number + 1}/{options.rounds}: {schedule} {seconds[-1]:.3f} s a step")
    medians = {schedule: statistics.median(seconds) for schedule, seconds in times.items()}
    print(f"| schedule, {case.name} | s a step | over {case.schedules[0]} |\n|---|---:|---:|")
    for schedule, median in medians.items():
        print(f"| {schedule} | {median:.3f} | {medians[case.schedules[0]] / median:.2f} |")
    return Exit.OK
