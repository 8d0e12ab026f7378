"""The CPU time of a rank's start: of its imports, and of a tiny job of one rank until its first checkpoint.

    .venv/bin/python tools/bench/rank_start.py [TREE ...]

TREE: folders of megascale's source, such as worktrees of two commits, which take turns (this one). Prints medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megascale.record.log_files import remove_left_logs

CONFIG = """
name = "start"
[model]
num_layers = 2
hidden_size = 32
num_heads = 2
vocab_size = 64
seq_length = 16
[batch]
micro = 1
global = 2
[train]
precision = "fp32"
steps = 3
[optimizer]
lr = 1e-3
warmup_steps = 1
[data]
mock = true
[checkpoint]
every = 1000
[observe]
tensorboard = false
"""

REPORT = """
import os, resource, sys
def report():
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("used", used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, len(sys.modules), flush=True)
    os._exit(0)
"""

STARTS = {
    "imports": "import megascale.cli.train, megascale.train.entry\nreport()",
    "three steps": (
        "from megascale.checkpoint.checkpoints import Checkpoints\n"
        "Checkpoints.start_save = lambda *arguments: report()\n"
        "from megascale.cli.main import main\nmain(['train', 'config.toml'])"
    ),
}
"""What is measured, and the code whose end calls `report`."""


def measure(code: str, tree: Path) -> tuple[float, ...]:
    """Return CPU seconds, peak memory in MiB and modules of a new Python that runs `code` with the source in `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.toml").write_text(CONFIG, encoding="utf-8")
        env = os.environ | {"PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", REPORT + code]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    remove_left_logs("start")  # of a rank that ended without a farewell
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("used "))
    return tuple(map(float, line.split()[1:]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", metavar="TREE", nargs="*", type=Path, default=[Path(__file__).parents[2]])
    parser.add_argument("--runs", type=int, default=5, help="runs of each (5)")
    options = parser.parse_args(arguments)
    for what, code in STARTS.items():
        found: dict[Path, list[tuple[float, ...]]] = {tree: [] for tree in options.trees}
        for _ in range(options.runs):
            for tree, runs in found.items():
                runs.append(measure(code, tree))
        for tree, runs in found.items():
            cpu, memory, modules = map(statistics.median, zip(*runs, strict=True))
            print(f"{tree.resolve().name}: {what}: {cpu:.2f} s of CPU time, {memory:.0f} MiB, {modules:.0f} modules")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
