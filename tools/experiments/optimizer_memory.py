#!/usr/bin/env python3
"""Measure what state in host memory and CompAct leave on the device, for a small model in one process: peak memory of
the device, counted by the trainer on fake tensors; bytes in host memory; and processor time of a step, of runs that
take their steps in turn. Host and device are one CPU, which computes nothing while it copies: the times are what the
ways compute and copy in all, not what a GPU hides. What strides gain on GPUs is planned.

`tools/results.py optimizer-memory` writes docs/results/optimizer-memory.md by this tool.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from typing import Any

import torch
from curves import table
from memory_policies import measure

from megascale.config.loading import load_config, load_config_tree
from megascale.config.run import RunConfig
from megascale.core.units import MIB
from megascale.layout import buckets
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.state_bytes import host_state_bytes
from megascale.plan.dryrun.dry_run import dry_run
from megascale.plan.simulate.host_update import host_update
from megascale.plan.simulate.profiles import hardware

SUB_GROUP = 1 << 17  # elements, for a small model
IN_HOST = {"offload": "host"}
WAYS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "host, all updated there": IN_HOST | {"offload_stride": 0},
    "host, every 4th on the device": IN_HOST | {"offload_stride": 4},
    "host, every 2nd on the device": IN_HOST | {"offload_stride": 2},
    "host, all on the device": IN_HOST | {"offload_stride": 1},
    "compact, rank 128": {"name": "compact", "options": {"rank": 128}},
    "compact, rank 64": {"name": "compact", "options": {"rank": 64}},
    "compact, rank 32": {"name": "compact", "options": {"rank": 32}},
}
"""Keys of [optimizer] of each way."""

HEAD = (
    "optimizer", "peak MiB", "planned", "over adamw", "saved for backward", "host MiB", "CPU ms a step", "over adamw",
    "last loss less adamw's",
)  # fmt: skip

CONFIG, GPUS, PROFILE = "configs/gpu/llama3-8b.toml", 64, "a100-80g"
STRIDES = (0, 8, 4, 3, 2, 1)


def config_of(way: str, folder: str) -> RunConfig:
    """Return the configuration of a way."""
    tree = {
        "name": "optimizers", "output_dir": folder,
        "model": {
            "num_layers": 4, "hidden_size": 256, "num_heads": 4, "ffn_size": 768, "vocab_size": 512, "seq_length": 512,
            "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
        },
        "batch": {"micro": 2, "global": 2}, "train": {"steps": 1000, "precision": "bf16"},
        "optimizer": {"lr": 1e-3} | WAYS[way], "data": {"mock": True}, "checkpoint": {"every": 0},
        "observe": {"tensorboard": False, "event_store": False},
    }  # fmt: skip
    return load_config_tree(tree, way)


def planned_updates() -> str:
    """Plan the update of a large model on GPUs by stride, and return the table."""
    config = load_config(CONFIG, ["optimizer.offload=host"], world_size=GPUS)
    update = host_update(config, hardware(PROFILE))
    assert update is not None, "the profile states the rates"
    seconds = {stride: update.seconds(stride) for stride in STRIDES}
    rows = [(stride, f"{1e3 * found:.0f}", f"{seconds[0] / found:.2f}") for stride, found in seconds.items()]
    return table(rows, ("offload_stride", "planned ms of an update", "speed-up over 0"))


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps of each run (default: 10)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, loads = list[tuple[str, ...]](), [os.getloadavg()[0]]
    buckets.SUB_GROUP = SUB_GROUP
    with tempfile.TemporaryDirectory() as folder:
        configs = {way: config_of(way, folder) for way in WAYS}
        measured = measure(configs, options.steps)
        loads.append(os.getloadavg()[0])
        peaks = {way: dry_run(config, 0).peak.total() for way, config in configs.items()}
        seconds = {way: statistics.median(found.seconds[1:]) for way, found in measured.items()}
        for way, config in configs.items():
            rank, losses = JobMemory(config).rank(0), measured[way].losses
            sizes = (f"{size / MIB:.1f}" for size in (peaks[way], rank.total))
            kept = (f"{size / MIB:.1f}" for size in (rank.activations, host_state_bytes(config)))
            equal = (
                "bit-equal"
                if losses == measured["adamw"].losses
                else f"{losses[-1] - measured['adamw'].losses[-1]:+.4f}"
            )
            ratios = peaks[way] / peaks["adamw"], seconds[way] / seconds["adamw"]
            rows.append(
                (way, *sizes, f"{ratios[0]:.2f}", *kept, f"{1e3 * seconds[way]:.0f}", f"{ratios[1]:.2f}", equal)
            )
    print(table(rows, HEAD))
    load, cores = " to ".join(f"{load:.0f}" for load in loads), os.cpu_count()
    print(f"\nTimes are medians of {options.steps} steps, at a load of {load} processes on {cores} cores.")
    print(f"\nPlanned, not measured: {CONFIG} on {GPUS} GPUs of {PROFILE}, whose nodes have a host memory each.\n")
    print(planned_updates())


if __name__ == "__main__":
    main()
