"""A demonstration of what can be seen of a run: train the quickstart's model, with shorter sequences, on eight ranks: a
slow rank, a slow link, and at the end a rank that hangs. The commands say who it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.commands.chaos import without_data
from megascale.cli.parsing import CommandParser
from megascale.core.process import die_with_parent

ROOT = Path(__file__).parents[1]

SLOW_RANK, LINK, HUNG_RANK = 2, (1, 5), 7
"""The culprits: a rank that computes more slowly, both ends of a link, and a rank that hangs."""

DELAY_S, FACTOR = 0.5, 4.0
"""Seconds that messages over the slow link are late, and by how much longer the slow rank computes: ranks that share
cores are named for large costs only.
"""

STEPS = 80
"""Step in which the rank hangs."""

LIMIT_S = 600
"""Longest time until the job hangs, in seconds."""


def faults(steps: int) -> tuple[str, ...]:
    """Return the injected faults, as in `fault.inject`: from the middle on, so that the steps before tell the cost."""
    return (
        f"slow_compute rank={SLOW_RANK} step={steps // 2} steps={steps} factor={FACTOR:g}",
        f"delay_message rank={LINK[0]} step={steps // 2} steps={steps} delay_s={DELAY_S}",
        f"hang rank={HUNG_RANK} step={steps} phase=backward",
    )


def main() -> int:
    """Run the demonstration. Exit status: 0 if the commands name all three."""
    parser = CommandParser(
        "tools/demo_observe.py", __doc__ or "", "python tools/demo_observe.py --steps 40", "docs/slow-runs.md"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="folder of the run (default: runs)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"step in which a rank hangs (default: {STEPS})")
    options = parser.parse_args()
    run = options.folder / time.strftime("demo-observe-%Y%m%d-%H%M%S")
    print("faults:", *faults(options.steps), sep="\n  ", flush=True)
    with training(run, options.steps):
        wait_for_step(run, options.steps * 3 // 4)
        show("watch", run, "--once")
        verdict = wait_for_hang(run)
        show("diagnose", run, "--picture", run / "waits.svg")
    show("events", run, "slowest-ranks")
    show("diagnose", run, "--mfu")
    show("dashboard", run, "--file", run / "report.html")
    show("diagnose", run, "--slow")
    answer = subprocess.run(megascale("diagnose", run, "--slow", "--json"), capture_output=True, check=True)
    found = json.loads(answer.stdout)["findings"]
    missed = [name for name, named in verdicts(found, verdict).items() if not named]
    print(f"\n{'all three were named' if not missed else 'not named: ' + ', '.join(missed)}; the run is in {run}")
    return len(missed)


def verdicts(found: Sequence[dict[str, Any]], hang: dict[str, Any]) -> dict[str, bool]:
    """Return by injected fault whether the findings and the verdict about the hang name its culprit."""
    kinds = {(finding["kind"], tuple(finding["ranks"])) for finding in found}
    return {
        f"rank {SLOW_RANK}, which computes slowly": ("compute", (SLOW_RANK,)) in kinds,
        f"the slow link of ranks {LINK[0]} and {LINK[1]}": ("link", LINK) in kinds,
        f"rank {HUNG_RANK}, which hangs": bool(hang.get("verdict")) and hang["verdict"]["ranks"] == [HUNG_RANK],
    }


@contextlib.contextmanager
def training(run: Path, steps: int) -> Iterator[None]:
    """Train in the background, and end the job after the block."""
    run.parent.mkdir(parents=True, exist_ok=True)
    config = run.parent / "demo-observe.toml"
    config.write_text(without_data((ROOT / "configs/quickstart.toml").read_text(encoding="utf-8")), encoding="utf-8")
    settings = [
        f"name={run.name}", f"output_dir={run.parent}", "data.mock=true", "parallel.dp=2", "train.steps=100000",
        "train.log_every=1", "train.eval_every=0", "checkpoint.every=100000", "observe.store_interval_s=5",
        "model.seq_length=128", "batch.global=8", f"fault.inject={'; '.join(faults(steps))}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "megascale", "train", str(config), *settings]
    print(f"\n$ megascale train {config} {shlex.join(settings)}", flush=True)
    parent = os.getpid()
    with open(run.parent / f"{run.name}.log", "wb") as log:
        job = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
        )  # fmt: skip
        try:
            yield
        finally:
            for _ in range(2):  # the hung rank does not hear the first one; at the second the launcher kills it
                job.send_signal(signal.SIGTERM)
                time.sleep(2)
            job.wait()


def wait_for_step(run: Path, step: int) -> None:
    """Return when the job has trained a step, or LIMIT_S seconds have passed."""
    until, metrics = time.monotonic() + LIMIT_S, run / "metrics.jsonl"
    while time.monotonic() < until:
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        if any(record.get("step", 0) >= step for record in map(json.loads, lines[:-1])):  # the last may be half written
            return
        time.sleep(0.5)


def wait_for_hang(run: Path) -> dict[str, Any]:
    """Return the verdict of `megascale diagnose`, as soon as it says that the run hangs."""
    until, verdict = time.monotonic() + LIMIT_S, dict[str, Any]()
    while time.monotonic() < until and verdict.get("condition") != "hangs":
        time.sleep(2)
        answer = subprocess.run(megascale("diagnose", run, "--json"), capture_output=True, text=True, check=False)
        verdict = json.loads(answer.stdout) if not answer.returncode else {}
    return verdict


def megascale(*arguments: str | Path) -> list[str]:
    """Return the `megascale` command of this Python."""
    return [sys.executable, "-m", "megascale", *map(str, arguments)]


def show(*arguments: str | Path) -> None:
    """Print and run a command."""
    print(f"\n$ megascale {shlex.join(map(str, arguments))}", flush=True)
    subprocess.run(megascale(*arguments), check=False)


if __name__ == "__main__":
    sys.exit(main())
