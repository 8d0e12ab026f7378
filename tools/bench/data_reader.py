"""Step times of a run on slow storage, with `data.reader = "rank"` and `"host"` in turn.

    .venv/bin/python tools/bench/data_reader.py --delays 0 0.2 1

A storage stand-in on this host answers every request after a delay. Each step needs about as many new blocks as it has
samples, because the dataset is much larger than what a run reads. A run is a process of its own, of one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megascale.data.read.indexed_dataset import HEADER

ROOT = Path(__file__).parents[2]
DOCUMENTS, LENGTH, TOKEN_BYTES = 2000, 100_000, 2
WARM_UP_STEPS = 3
MODEL = {"num_layers": 2, "hidden_size": 128, "num_heads": 4, "vocab_size": 4096, "seq_length": 128}


def make(prefix: Path) -> None:
    """Write a dataset of sparse tokens, 400 MB."""
    lengths = np.full(DOCUMENTS, LENGTH, dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int64) * TOKEN_BYTES
    with open(prefix.with_suffix(".bin"), "wb") as file:
        file.truncate(int(ends[-1]))
    header = np.array([(b"MMIDIDX\x00\x00", 1, 8, DOCUMENTS, DOCUMENTS + 1)], dtype=HEADER)
    offsets = ends - lengths.astype(np.int64) * TOKEN_BYTES
    parts = (header, lengths, offsets, np.arange(DOCUMENTS + 1, dtype=np.int64))
    prefix.with_suffix(".idx").write_bytes(b"".join(part.tobytes() for part in parts))


@contextmanager
def storage(folder: Path, delay_s: float) -> Iterator[str]:
    """Serve the folder from another process; yield its URL."""
    command = [sys.executable, "-m", "tests.slow_storage", str(folder), str(delay_s)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait()


def run_case(url: str, reader: str, steps: int, batch: int) -> dict[str, Any]:
    """Run a case in a process of its own; return its figures."""
    command = [sys.executable, __file__, "--case", url, reader, "--steps", str(steps), "--batch", str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(url: str, reader: str, steps: int, batch: int) -> dict[str, float]:
    """Train in this process; return medians of a step's time and of its wait for a batch, in seconds."""
    from megascale.config.loading import load_config_tree
    from megascale.core.rank import Rank
    from megascale.device import detect_device
    from megascale.record.layout import Phase
    from megascale.train.build import build_mesh, build_rank_run
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter
    from megascale.train.run import Hook
    from megascale.train.step_rows import TAG_SHARES
    from megascale.train.stop import StopRequest

    waits, ends = [], [time.perf_counter()]

    class Clock(Hook):
        def step_ends(self, run: Any, result: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        tree = {"name": "bench", "model": MODEL, "batch": {"global": batch, "micro": batch}}
        tree |= {"train": {"steps": steps, "log_every": steps}, "optimizer": {"lr": 1e-4}}
        tree |= {
            "checkpoint": {"every": 0},
            "output_dir": folder,
            "observe": {"tensorboard": False, "event_store": False},
        }
        tree |= {"data": {"train": f"{url}/set", "cache": f"{folder}/cache", "reader": reader, "split": [1.0, 0.0]}}
        config, device = load_config_tree(tree, "bench"), detect_device(allow_gpu=False)
        rank = Rank(0, 1, 0, "host")
        run = build_rank_run(config, build_mesh(config, rank, device), device, StopRequest())
        load = run.train_loader.batch

        def batch_of(consumed: int) -> Any:
            begun = time.perf_counter()
            found = load(consumed)
            waits.append(time.perf_counter() - begun)
            return found

        run.train_loader.batch = batch_of  # type: ignore
        run.hooks.add(Clock())
        train(run, Reporter(config, device, None, [], run.mesh.recorder))
    times = [after - before for before, after in pairwise(ends)][WARM_UP_STEPS:]
    waits = waits[WARM_UP_STEPS:]
    named = sum(wait > TAG_SHARES[Phase.DATA] * seconds for wait, seconds in zip(waits, times, strict=True))
    return {"step_s": statistics.median(times), "wait_s": statistics.median(waits), "named": named, "steps": len(times)}


def main() -> None:
    """Run the cases, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.2, 1.0], help="seconds of a request")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--case", nargs=2, metavar=("URL", "READER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case[0], options.case[1], options.steps, options.batch)))
        return
    print(f"load of the machine: {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs\n")
    print("| delay s | reader | step s | wait for the batch s | steps named data-bound |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "set")
        for delay in options.delays:
            for _ in range(options.rounds):
                for reader in ("rank", "host"):
                    with storage(Path(folder), delay) as url:
                        f = run_case(url, reader, options.steps, options.batch)
                    cells = f"{delay} | {reader} | {f['step_s']:.3f} | {f['wait_s']:.3f} | {f['named']} of {f['steps']}"
                    print(f"| {cells} |", flush=True)
    print(f"\nload of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
