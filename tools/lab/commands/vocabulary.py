"""Vocabulary parallelism beside head and embedding on the last and the first stage: step and processor time
on this machine, in turn, and the memory of every stage by dry runs.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.overlap import COMMON_SETTINGS, OverlapError, Settings, settings_to_toml, timed_steps
from megascale.cli.arguments import positive_int
from megascale.config.loading import load_config
from megascale.core.files import write_text
from megascale.plan.dryrun.dry_run import dry_run

KINDS = {"first and last stage": 0, "all stages, two barriers": 2, "all stages, one barrier": 1}
STEPS = 4

JOB: Settings = COMMON_SETTINGS | {
    "model.vocab_size": "131072", "model.num_layers": "12", "model.hidden_size": "256", "model.num_heads": "4",
    "model.ffn_size": "768", "model.seq_length": "64", "batch.micro": "1", "batch.global": "8",
    "train.precision": '"fp32"',
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--rounds", type=positive_int, default=2, metavar="N", help="runs of each kind (default: 2)")
    parser.add_argument("--stages", type=positive_int, default=2, metavar="P", help="pipeline stages (default: 2)")
    parser.add_argument("--dry-stages", type=positive_int, default=4, metavar="P", help="of the dry runs (default: 4)")


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    busiest: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for kind, barriers in KINDS.items():
                name = f"barriers{barriers}-{number}"
                start, ended = (
                    _train(_config(Path(folder), f"{name}-{steps}", options.stages, barriers, steps), options.stages)
                    for steps in (1, STEPS)
                )
                busiest[kind].append(max(b - a for a, b in zip(start, ended, strict=True)) / (STEPS - 1))
                times[kind] += [step["step_time_s"] for step in timed_steps(Path(folder) / f"{name}-{STEPS}")]
        head = f"step s, pp{options.stages}", "processor s of the busiest rank"
        print(f"| embedding and head | {' | '.join(head)} | GiB of a rank by stage, pp{options.dry_stages} |")
        print("|---|---:|---:|---|")
        for kind, barriers in KINDS.items():
            config = _config(Path(folder), f"dry{barriers}", options.dry_stages, barriers, STEPS)
            resolved = load_config(str(config))
            peaks = [dry_run(resolved, rank).peak.total() / 2**30 for rank in range(options.dry_stages)]
            measured = f"{min(times[kind]):.2f} | {min(busiest[kind]):.2f}"
            print(f"| {kind} | {measured} | {', '.join(f'{peak:.2f}' for peak in peaks)} |")
    print(
        f"\nThe least of {options.rounds} alternating runs. Processor time is that of {STEPS} steps less that of one:"
    )
    print("other work on the machine takes the time in which ranks wait, and hides what a pipeline waits for.")
    return 0


def _config(folder: Path, name: str, stages: int, barriers: int, steps: int) -> Path:
    settings = {"name": f'"{name}"', "output_dir": f'"{folder}"'} | JOB
    settings |= {"parallel.pp": str(stages), "parallel.vocab_pp": str(barriers), "train.steps": str(steps)}
    write_text(folder / f"{name}.toml", settings_to_toml(settings))
    return folder / f"{name}.toml"


def _train(config: Path, ranks: int) -> list[float]:
    """Train as ranks of this host; return the processor seconds of each."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "megascale", "train", str(config)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    ends = [os.wait4(process.pid, 0) for process in started]
    if any(status for _, status, _ in ends):
        raise OverlapError(f"the job {config} failed")
    return [usage.ru_utime + usage.ru_stime for _, _, usage in ends]
