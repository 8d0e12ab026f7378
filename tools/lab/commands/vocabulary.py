"""Vocabulary parallelism beside head and embedding on the last and the first stage: step time on this machine's
processor, rounds in turn, and the memory of every stage by dry runs.
"""

from __future__ import annotations

import argparse
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
    "train.precision": '"fp32"', "train.steps": str(STEPS),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="runs of each kind (default: 3)")
    parser.add_argument("--stages", type=positive_int, default=2, metavar="P", help="pipeline stages (default: 2)")
    parser.add_argument("--dry-stages", type=positive_int, default=4, metavar="P", help="of the dry runs (default: 4)")


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for kind, barriers in KINDS.items():
                name = f"barriers{barriers}-{number}"
                config = _config(Path(folder), name, options.stages, barriers)
                _train(config, options.stages)
                times[kind] += [step["step_time_s"] for step in timed_steps(Path(folder) / name)]
        print(f"| embedding and head | step s, pp{options.stages} | GiB of a rank by stage, pp{options.dry_stages} |")
        print("|---|---:|---|")
        for kind, barriers in KINDS.items():
            config = _config(Path(folder), f"dry{barriers}", options.dry_stages, barriers)
            resolved = load_config(str(config))
            peaks = [dry_run(resolved, rank).peak.total() / 2**30 for rank in range(options.dry_stages)]
            print(f"| {kind} | {min(times[kind]):.2f} | {', '.join(f'{peak:.2f}' for peak in peaks)} |")
    print(f"\nStep times are the least of {options.rounds} alternating runs with {STEPS - 2} timed steps each.")
    return 0


def _config(folder: Path, name: str, stages: int, barriers: int) -> Path:
    settings = {"name": f'"{name}"', "output_dir": f'"{folder}"'} | JOB
    settings |= {"parallel.pp": str(stages), "parallel.vocab_pp": str(barriers)}
    write_text(folder / f"{name}.toml", settings_to_toml(settings))
    return folder / f"{name}.toml"


def _train(config: Path, ranks: int) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ended = subprocess.run([*launcher, "-m", "megascale", "train", str(config)], capture_output=True, text=True)
    if ended.returncode:
        raise OverlapError(f"the job {config} exited with status {ended.returncode}: {ended.stderr[-500:]}")
