"""Step times of update rules beside AdamW's on this machine's CPUs, with data parallelism and ZeRO-1.

Jobs of the rules alternate, one of every rule per round; a table has medians over rounds. A step on CPUs has a larger
share of the update than one on GPUs with a usual batch: `--tokens` sets the tokens of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.overlap import COMMON_SETTINGS, Settings, settings_to_toml, timed_steps
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.core.files import write_text

MODEL: Settings = {
    "model.num_layers": "4",
    "model.hidden_size": "512",
    "model.num_heads": "8",
    "model.ffn_size": "1408",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--rules", nargs="+", choices=OPTIMIZERS.names(), default=["adamw", "muon"], metavar="RULE")
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 4], help="data-parallel ranks; default 2 4")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step; default %(default)s")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> int:
    """Run the jobs, and print the table."""
    print("| dp | rule | s a step | against the first | exposed dp communication, s |\n|---|---|---|---|---|")
    for dp in options.dp:
        found: dict[str, list[tuple[float, float]]] = {rule: [] for rule in options.rules}
        for _ in range(options.rounds):
            for rule in options.rules:
                found[rule].append(train(options, rule, dp))
        medians = {
            rule: [statistics.median(values) for values in zip(*runs, strict=True)] for rule, runs in found.items()
        }
        first = medians[options.rules[0]][0]
        for rule, (step, exposed) in medians.items():
            print(f"| {dp} | {rule} | {step:.3f} | {step / first:.2f} | {exposed:.3f} |", flush=True)
    return 0


def train(options: argparse.Namespace, rule: str, dp: int) -> tuple[float, float]:
    """Run a job; return median seconds of a step, and of its exposed communication over dp."""
    with tempfile.TemporaryDirectory() as scratch:
        keys = COMMON_SETTINGS | MODEL | {"parallel.dp": str(dp), "optimizer.name": f'"{rule}"', "batch.micro": "1"}
        keys |= {"batch.global": str(options.tokens // 256), "train.steps": str(options.steps), "name": '"run"'}
        config = Path(scratch) / "run.toml"
        write_text(config, settings_to_toml(keys | {"output_dir": json.dumps(scratch)}))
        done = subprocess.run(
            [sys.executable, "-m", "megascale", "train", str(config)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{rule} with dp {dp} failed:\n{done.stderr[-3000:]}")
        steps = timed_steps(Path(scratch) / "run")
    times = (line["step_time_s"] for line in steps)
    exposed = (line["communication"]["dp"]["exposed_s"] for line in steps)
    return statistics.median(times), statistics.median(exposed)
