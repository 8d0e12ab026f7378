#!/usr/bin/env python3
"""Train a small model on the bytes of Python's own library, grow it to twice the layers and the width, and go on;
beside it, go on with the small model, and train the large one from the start. Then go on with weights frozen by
Spectrum. `--write` makes docs/results/growth.md; about two minutes of two cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from curves import table
from width_transfer import SEQUENCE, Bytes

from megascale.checkpoint import folders
from megascale.config.loading import load_config_tree
from megascale.config.run import RunConfig
from megascale.convert.growth import grow
from megascale.convert.spectrum import frozen_tensors, measure
from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.data.mix.loader import BatchShape, Loader
from megascale.device import detect_device
from megascale.plan.account.flops import model_flops
from megascale.train.build import build_mesh, build_rank_run
from megascale.train.resume import load_initial_state
from megascale.train.step import train_step
from megascale.train.stop import StopRequest

SAMPLES, RATE, MEAN = 8, 2e-3, 20  # samples of a step, learning rate, steps of a mean loss
SMALL = {
    "num_layers": 4, "hidden_size": 64, "num_heads": 2, "head_dim": 32, "ffn_size": 256, "vocab_size": 256,
    "seq_length": SEQUENCE, "position": "rope", "bias": False, "norm": "rmsnorm", "tie_embeddings": False,
}  # fmt: skip
LARGE = SMALL | {"num_layers": 8, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 512}
TOPS = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class Trained:
    """Losses by step, the folder of the checkpoint, FLOPs of a step, and bytes of gradients and optimizer state and the
    median CPU time of a step, in seconds.
    """

    losses: Sequence[float]
    folder: Path
    flops: float
    state_bytes: int
    seconds: float


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="steps before the growth, and after it (default: 150)")
    parser.add_argument("--write", action="store_true", help="write docs/results/growth.md")
    options = parser.parse_args()
    steps = options.steps
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2) as pool:
        root = Path(folder)
        scratch = pool.submit(train, "large from the start", LARGE, 2 * steps, root)
        small = pool.submit(train, "small", SMALL, steps, root).result()
        source = folders.find_checkpoint(Location(str(small.folder)))
        grow(source, root / "grown", config_of("grown", LARGE, 2 * steps, root).model, 0, "large")
        on = pool.submit(train, "small goes on", SMALL, 2 * steps, root, str(source)).result()
        grown = pool.submit(train, "grown", LARGE, 2 * steps, root, str(root / "grown")).result()
        parts = [growth_table(small, {"small goes on": on, "grown": grown, "large from the start": scratch.result()})]
        print(parts[0], flush=True)
        source = folders.find_checkpoint(Location(str(grown.folder)))
        snr = measure(source)
        rows = []
        for top in TOPS:  # one after another, for their times
            freeze = frozen_tensors(snr, top)
            result = pool.submit(train, f"top {top}", LARGE, 3 * steps, root, str(source), freeze).result()
            rows.append((f"{top:.0%}", result))
    parts.append(freezing_table(rows))
    print(parts[1])
    if options.write:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from results import write_page

        write_page("growth", "Growth and frozen weights", sentence(steps), parts)


def sentence(steps: int) -> str:
    """Say what is measured."""
    return (
        f"A model of {SMALL['num_layers']} layers of width {SMALL['hidden_size']} predicts the bytes of Python's "
        f"library for {steps} steps of {SAMPLES * SEQUENCE} bytes with AdamW at a constant rate, grows to "
        f"{LARGE['num_layers']} layers of width {LARGE['hidden_size']}, and goes on for as many; then with the share "
        f"of each kind of weights that Spectrum chooses. Losses are means of {MEAN} steps, but for the first; one seed."
    )


def config_of(
    name: str, model: Mapping[str, Any], steps: int, root: Path, resume: str = "auto", freeze: Sequence[str] = ()
) -> RunConfig:
    """Return the configuration of a run."""
    tree = {
        "name": name.replace(" ", "-"), "output_dir": str(root), "model": dict(model),
        "batch": {"micro": SAMPLES, "global": SAMPLES},
        "train": {"steps": steps, "precision": "fp32", "freeze": list(freeze)},
        "optimizer": {"lr": RATE, "decay": "constant", "warmup_steps": 20},
        "data": {"mock": True}, "checkpoint": {"every": steps, "resume": resume},
    }  # fmt: skip
    return load_config_tree(tree, name)


def train(
    name: str, model: Mapping[str, Any], steps: int, root: Path, resume: str = "auto", freeze: Sequence[str] = ()
) -> Trained:
    """Train up to a step, and save."""
    torch.set_num_threads(1)
    config, device = config_of(name, model, steps, root, resume, freeze), detect_device(allow_gpu=False)
    run = build_rank_run(config, build_mesh(config, Rank(0, 1, 0, "localhost"), device), device, StopRequest())
    load_initial_state(run, no_weights)
    shape = BatchShape(SAMPLES, SAMPLES, 1)
    loader = Loader(Bytes(steps * SAMPLES), shape, 0, dropout=0.0, seed=0, device=device.torch_device)
    losses, times = [], []
    for step in range(run.progress.step, steps):
        begin = time.process_time()
        losses.append(train_step(run, loader.batch(step * SAMPLES)).loss)
        times.append(time.process_time() - begin)
    run.checkpoints.save(run.progress)
    held = sum(shard.bytes for shard in run.optimizer.shards)
    held += sum(bucket.grad.nbytes for bucket in run.buffers.buckets)
    flops = model_flops(config).causal * SAMPLES * SEQUENCE
    return Trained(losses, config.folder, flops, held, statistics.median(times))


def no_weights(folder: Path) -> Any:
    """Refuse foreign weights."""
    raise FileNotFoundError(folder)


def growth_table(small: Trained, runs: Mapping[str, Trained]) -> str:
    """Compare runs after the growth."""
    before, steps = mean(small.losses[-MEAN:]), len(small.losses)
    rows = []
    for name, run in runs.items():
        losses = run.losses[-steps:]
        spent = run.flops * len(run.losses) + (small.flops * steps if len(run.losses) == steps else 0)
        marks = (losses[0], mean(losses[:MEAN]), mean(losses[steps // 2 :][:MEAN]), mean(losses[-MEAN:]))
        rows.append([name, *(f"{loss:.3f}" for loss in marks), f"{spent / 1e12:.2f}"])
    head = ("run", "first step", f"first {MEAN}", "halfway", "end", "TFLOPs in all")
    text = f"## Growth\n\nThe small model's last {MEAN} steps before the growth have a loss of {before:.3f}."
    return f"{text}\n\n{table(rows, head)}"


def freezing_table(runs: Sequence[tuple[str, Trained]]) -> str:
    """Compare shares of trained weights."""
    rows = [
        [top, f"{run.state_bytes / 2**20:.2f}", f"{run.flops / 1e9:.2f}", f"{run.seconds * 1e3:.1f}",
         f"{mean(run.losses[-MEAN:]):.3f}"]
        for top, run in runs
    ]  # fmt: skip
    head = ("trained", "gradients and optimizer, MiB", "GFLOPs a step", "CPU ms a step", "loss at the end")
    return f"## Frozen weights\n\n{table(rows, head)}"


def mean(losses: Sequence[float]) -> float:
    """Return the mean of losses."""
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
