#!/usr/bin/env python3
"""Time training steps of linear and softmax attention by a sequence's length; write docs/results/linear-attention.md.

The models differ in `attention_pattern` alone. Rounds alternate between them, and a cell is the median of its rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megascale.bench.timed_steps import build_run, take_step, time_steps
from megascale.config.loading import load_config_tree
from megascale.config.run import RunConfig
from megascale.device import detect_device
from megascale.plan.account.flops import token_flops
from results import pipes, write_page

PATTERNS = {"softmax": "S", "7 of 8 linear": "LLLLLLLS", "linear": "L"}
MODEL = {
    "num_layers": 8, "hidden_size": 256, "num_heads": 4, "vocab_size": 1024, "norm": "rmsnorm", "activation": "swiglu",
    "position": "rope", "bias": False,
}  # fmt: skip


def configured(pattern: str, length: int) -> RunConfig:
    """Return a run of a sequence a step in fp32."""
    tree = {
        "name": "linear-attention",
        "model": MODEL | {"attention_pattern": pattern, "seq_length": length},
        "batch": {"micro": 1, "global": 1},
        "train": {"steps": 100, "precision": "fp32"},
        "optimizer": {"lr": 1e-4},
        "data": {"mock": True},
        "checkpoint": {"every": 0},
        "observe": {"tensorboard": False, "event_store": False},
    }
    return load_config_tree(tree, "linear attention", world_size=1)


def measure(length: int, rounds: int) -> dict[str, float]:
    """Time steps of every pattern in alternating rounds; return the median seconds."""
    device, times = detect_device(allow_gpu=False), dict[str, list[float]]()
    runs = {name: build_run(configured(pattern, length), device) for name, pattern in PATTERNS.items()}
    for run in runs.values():
        take_step(run)
    for _ in range(rounds):
        for name, run in runs.items():
            times.setdefault(name, []).extend(time_steps(run, 1)[0])
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows, flops = [["tokens", *PATTERNS, "softmax / linear"]], [["tokens", *PATTERNS]]
    for length in options.lengths:
        found = measure(length, options.rounds)
        ratio = found["softmax"] / found["linear"]
        rows.append([f"{length:,}", *(f"{seconds:.2f}" for seconds in found.values()), f"{ratio:.2f}"])
        counted = [token_flops(configured(pattern, length).model).causal / 1e6 for pattern in PATTERNS.values()]
        flops.append([f"{length:,}", *(f"{each:.0f}" for each in counted)])
    write_page(
        "linear-attention",
        "Linear attention",
        "Time of a training step by the length of its sequence, with softmax and with linear attention.",
        [
            "Seconds of a step of one sequence in fp32, 8 layers of width 256 with 4 heads, medians of "
            f"{options.rounds} alternating rounds. Other work on the machine slows all columns: compare them, not "
            "pages.",
            "\n".join(pipes(*rows)),
            "Million FLOPs of training per token, causal.",
            "\n".join(pipes(*flops)),
        ],
    )


if __name__ == "__main__":
    main()
