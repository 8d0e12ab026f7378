#!/usr/bin/env python3
"""Measure each policy of `train.memory` on a small model in one process: peak memory of the device, counted by the
trainer on fake tensors; bytes elsewhere; and processor time of a step, of runs that take their steps in turn. A CPU
computes nothing while it copies: the times are what copies and recomputation cost, not what a GPU hides.

`tools/results.py memory-policies` writes docs/results/memory-policies.md by this tool.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import torch
from curves import table

from megascale.bench.timed_steps import build_run, take_step
from megascale.config.loading import load_config_tree
from megascale.config.run import RunConfig
from megascale.core.units import MIB
from megascale.device import detect_device
from megascale.plan.account.memory import JobMemory
from megascale.plan.dryrun.dry_run import dry_run

TILES = 4
WAYS: dict[str, dict[str, Any]] = {
    "keep": {"memory": ["keep"]},
    "selective": {"memory": ["selective"], "recompute_ops": ["norm", "activation"]},
    "full": {"memory": ["full"]},
    "host": {"memory": ["host"]},
    "nvme": {"memory": ["nvme"]},
    "keep, tiles": {"memory": ["keep"], "mlp_tiles": TILES},
    "half of the tiles to the host": {"memory": [{"host": 0.5}], "mlp_tiles": TILES},
    "host, tiles": {"memory": ["host"], "mlp_tiles": TILES},
    "full, host and keep by turns": {"memory": ["full", "host", "keep", "keep"]},
}
"""Keys of [train] of each way."""

HEAD = ("policies", "peak MiB", "planned", "host MiB", "NVMe MiB a step", "CPU ms a step", "over keep", "losses")


class Measured(NamedTuple):
    """Processor seconds and loss of each step of a run."""

    seconds: list[float]
    losses: list[float]


def config_of(way: str, folder: str, layers: int) -> RunConfig:
    """Return the configuration of a way."""
    train: dict[str, Any] = {"steps": 1000, "precision": "fp32"} | WAYS[way]
    train |= {"memory_dir": folder} if "nvme" in train["memory"] else {}
    tree = {
        "name": "policies", "output_dir": folder,
        "model": {
            "num_layers": layers, "hidden_size": 256, "num_heads": 4, "ffn_size": 768, "vocab_size": 512,
            "seq_length": 1024, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False,
            "tie_embeddings": False,
        },
        "batch": {"micro": 2, "global": 2}, "train": train, "optimizer": {"lr": 1e-3}, "data": {"mock": True},
        "checkpoint": {"every": 0}, "observe": {"tensorboard": False, "event_store": False},
    }  # fmt: skip
    return load_config_tree(tree, way)


def measure(configs: dict[str, RunConfig], steps: int) -> dict[str, Measured]:
    """Take the steps of all runs in turn, after one that warms up."""
    device = detect_device(allow_gpu=False)
    runs = {way: build_run(config, device) for way, config in configs.items()}
    measured = {way: Measured([], []) for way in runs}
    for _ in range(1 + steps):
        for way, run in runs.items():
            start = time.process_time()
            measured[way].losses.append(take_step(run))
            measured[way].seconds.append(time.process_time() - start)
    return measured


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (default: 8)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run (default: 10)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[tuple[str, ...]]()
    with tempfile.TemporaryDirectory() as folder:
        configs = {way: config_of(way, folder, options.layers) for way in WAYS}
        measured = measure(configs, options.steps)
        for way, config in configs.items():
            job, own = JobMemory(config), measured[way]
            kept = measured["keep" if config.train.mlp_tiles == 1 else "keep, tiles"]
            peak, step = dry_run(config, 0).peak.total(), statistics.median(own.seconds[1:])
            sizes = peak, job.rank(0).total, job.moved_bytes(0, "host"), job.moved_in_step(0, "nvme")
            over = step / statistics.median(kept.seconds[1:])
            equal = "bit-equal" if own.losses == kept.losses else "differ"
            rows.append((way, *(f"{size / MIB:.1f}" for size in sizes), f"{1e3 * step:.0f}", f"{over:.2f}", equal))
    print(table(rows, HEAD))


if __name__ == "__main__":
    main()
