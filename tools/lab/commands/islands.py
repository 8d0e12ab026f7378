"""Jobs of 4 nodes on two islands of network namespaces with a slow link between: dp 2 and pp 2 in the order of the
scheduler, where dp crosses the link, and in that of `megascale launch --topology`, where pp does; and weights sharded
over all nodes, or over those of an island.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from lab.commands.testbed import rate
from lab.overlap import COMMON_SETTINGS, WARM_UP_STEPS, OverlapError, batch_keys, model_keys, timed_steps
from lab.testbed import HostLink, Testbed, export_testbed
from megascale.cli.arguments import at_least
from megascale.core.errors import Exit
from megascale.core.process import exit_on_stop_signals

HOSTS, ISLANDS = 4, 2

TOPOLOGY = "".join(
    f"SwitchName=island{island} Nodes={','.join(f'node{host}' for host in range(island, HOSTS, ISLANDS))}\n"
    for island in range(ISLANDS)
)
"""The switches of the testbed's hosts, in the form of Slurm's topology.conf."""

MODEL = COMMON_SETTINGS | model_keys(4, 256, 768) | batch_keys(1, 8)

LAYOUTS = {
    "dp 2, pp 2": ("parallel.dp=2", "parallel.pp=2"),
    "dp 4, zero = 3": ("parallel.dp=4", "parallel.zero=3"),
    "dp 4, zero = 3, dp_shard = 2": ("parallel.dp=4", "parallel.zero=3", "parallel.dp_shard=2"),
}
"""Settings of layouts by name."""


class Case(NamedTuple):
    """A layout with its nodes in an order, what crosses the link then, and the number of the case to compare with."""

    layout: str
    near: bool
    across: str
    base: int


CASES = (
    Case("dp 2, pp 2", False, "gradients and weights", 0),
    Case("dp 2, pp 2", True, "messages of stages", 0),
    Case("dp 4, zero = 3", True, "gradients, and weights twice", 2),
    Case("dp 4, zero = 3, dp_shard = 2", True, "gradients of a shard", 2),
)


class Job(NamedTuple):
    """A job by its median `step_s`, and the `sent` bytes of a step over the link between islands, start included."""

    step_s: float
    sent: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    inside, between = "1gbit", "100mbit"
    parser.add_argument("--rate", type=rate, default=rate(inside), help=f"of a host's link (default: {inside})")
    slow = f"of the link between islands (default: {between})"
    parser.add_argument("--between", type=rate, default=rate(between), metavar="RATE", help=slow)
    steps = at_least(WARM_UP_STEPS + 1, f"the first {WARM_UP_STEPS} steps are not timed")
    parser.add_argument("--steps", type=steps, default=12, metavar="N", help="steps of a job (default: 12)")


def run(options: argparse.Namespace) -> int:
    """Print a table: the seconds of a step, and the bytes that cross the slow link."""
    with exit_on_stop_signals(), tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "topology.conf").write_text(TOPOLOGY, encoding="utf-8")
        jobs = [launch(Path(folder), options, f"job{number}", case) for number, case in enumerate(CASES)]
    print("| layout | order of nodes | across the link | s a step | MB a step across | speed-up |")
    print("|---|---|---|---:|---:|---:|")
    for case, job in zip(CASES, jobs, strict=True):
        order, faster = "`--topology`" if case.near else "the scheduler's", jobs[case.base].step_s / job.step_s
        print(f"| {case.layout} | {order} | {case.across} | {job.step_s:.3f} | {job.sent / 1e6:.2f} | {faster:.2f} |")
    return Exit.OK


def launch(folder: Path, options: argparse.Namespace, name: str, case: Case) -> Job:
    """Run a job. Raises: OverlapError if it fails"""
    settings = MODEL | {"train.steps": str(options.steps), "name": name, "output_dir": str(folder)}
    words = [*(f"{key}={value}" for key, value in settings.items()), *LAYOUTS[case.layout]]
    words += ["--nodes", str(HOSTS), "--scheduler", "testbed"]
    words += ["--topology", str(folder / "topology.conf")] if case.near else []
    (folder / "job.toml").touch()
    command = [sys.executable, "-m", "megascale", "launch", str(folder / "job.toml"), *words]
    between = HostLink(options.between)
    with Testbed(HOSTS, HostLink(options.rate), islands=ISLANDS, between=between) as testbed:
        env = export_testbed(testbed) | {"OMP_NUM_THREADS": "1"}
        with open(folder / f"{name}.log", "w+", encoding="utf-8") as log:
            status = testbed.start_command(0, command, env, stdout=log, stderr=log).wait()
            if status:
                log.seek(0)
                raise OverlapError(f"{case.layout} ended with status {status}: {log.read()[-2000:]}")
        sent = testbed.bytes_between()
    return Job(statistics.median(each["step_time_s"] for each in timed_steps(folder / name)), sent / options.steps)
