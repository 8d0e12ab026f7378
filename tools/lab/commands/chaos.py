"""A demonstration of fault tolerance: train the quickstart's model on two nodes that are processes of this host, slow,
kill, hang and stop its ranks, and print the incidents. Nobody has to do anything meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megascale.operate.driver.incidents import LOG_FILE, Incident, read_history

ROOT = Path(__file__).parents[3]

FAULTS = (
    "slow rank=1 step=3 delay_s=0.5 steps=2",
    "kill rank=3 step=6 phase=backward",
    "hang rank=0 step=9 phase=data",
    "stop rank=2 step=12",
)
"""The injected faults, as in `fault.inject`."""

STEPS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="folder of the run (default: runs)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps to train (default: {STEPS})")


def run(options: argparse.Namespace) -> int:
    """Run the demonstration, and return the status of the job."""
    name = time.strftime("chaos-%Y%m%d-%H%M%S")
    options.folder.mkdir(parents=True, exist_ok=True)
    config = options.folder / "chaos.toml"
    config.write_text(without_data((ROOT / "configs/quickstart.toml").read_text(encoding="utf-8")), encoding="utf-8")
    settings = [
        f"name={name}", f"output_dir={options.folder}", "data.mock=true", f"train.steps={options.steps}",
        "optimizer.warmup_steps=1", "train.log_every=1", "train.eval_every=0", "checkpoint.every=1000",
        "checkpoint.in_memory_every=1", "checkpoint.replicate=true", f"fault.inject={'; '.join(FAULTS)}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "megascale", "launch", str(config), *settings]
    print("faults:", *FAULTS, sep="\n  ", flush=True)
    status = subprocess.run([*command, "--nodes", "2"], check=False).returncode
    print("", *table(tuple(read_history(options.folder / name / LOG_FILE).incidents.values())), sep="\n")
    return status


def without_data(text: str) -> str:
    """Return a configuration without its section `[data]`: the demonstration trains on random tokens."""
    before, _, after = text.partition("[data]\n")
    return before + after[after.index("\n[") + 1 :]


def table(incidents: Sequence[Incident]) -> Iterator[str]:
    """Yield a line for each incident: what happened, seconds to the verdict and to the first new step, steps lost."""
    yield f"{'class':10}{'culprit':18}{'action':10}{'verdict':>9}{'new step':>10}{'lost':>6}"
    for one in incidents:
        recovery = "" if one.recovery_s is None else f"{one.recovery_s:.1f} s"
        lost = "" if one.steps_lost is None else str(one.steps_lost)
        what = f"{one.class_:10}{one.culprit!s:18}{one.action.kind:10}"
        yield f"{what}{one.verdict_s:>7.1f} s{recovery:>10}{lost:>6}  {one.what}"
