#!/usr/bin/env python3
"""Train a tiny model on bytes of Python's standard library with recipes of low precision and parts of them, from the
same weights on the same tokens for each seed, and compare the mean losses of the last 50 steps with bf16's.

It catches gross faults, such as a wrong scale. It does not rank recipes: rotation, stochastic rounding, healing and the
choice of layers pay in long runs of large models alone.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from curves import ONE_PROCESS, table

from megascale.catalog.recipes import RECIPES, QuantizerSpec, with_specs
from megascale.cli.main import main as megascale
from megascale.comm.mesh import open_mesh
from megascale.config.loading import load_config
from megascale.core.registry import Card
from megascale.data.prepare.python_corpus import make_corpus
from megascale.device import detect_device
from megascale.layout.topology import Topology
from megascale.train.build import build_rank_run
from megascale.train.step import train_step
from megascale.train.stop import StopRequest

STEPS, LAST = 300, 50
CONFIG = "configs/quickstart.toml"
KEYS = (
    *ONE_PROCESS, "model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "model.ffn_size=192",
    "model.vocab_size=257", "model.seq_length=128", "batch.micro=4", "batch.global=4", f"train.steps={STEPS}",
    "train.eval_every=0", "checkpoint.every=0",
)  # fmt: skip
"""Changes to the quickstart: 512 bytes a step."""

ALL_LAYERS = ("train.precision=fp8", "fp8.first_layers_bf16=0", "fp8.last_layers_bf16=0")


PARTS: Mapping[str, Callable[[QuantizerSpec], QuantizerSpec]] = {
    "nvfp4-unrotated": lambda spec: replace(spec, rotated=False),
    "nvfp4-nearest": lambda spec: replace(spec, stochastic=False),
    "nvfp4-random": lambda spec: replace(spec, stochastic=True),
}
"""NVFP4 with other quantizers, by name."""


def register(key: str, change: Callable[[QuantizerSpec], QuantizerSpec]) -> None:
    """Register NVFP4 with other quantizers."""
    nvfp4 = RECIPES["nvfp4"]
    RECIPES.cards[key] = Card(key, nvfp4.help, nvfp4.target, with_specs(nvfp4.facts, change))


def variants() -> Mapping[str, Sequence[str]]:
    """Return the settings of each run."""

    def recipe(name: str, *more: str) -> Sequence[str]:
        return (*ALL_LAYERS, f"fp8.recipe={name}", *more)

    return {
        "bf16": ("train.precision=bf16",),
        "fp32": ("train.precision=fp32",),
        "tensorwise": recipe("tensorwise"),
        "tensorwise, powers of two": recipe("tensorwise", "fp8.scale=pow2"),
        "mxfp8": recipe("mxfp8"),
        "nvfp4": recipe("nvfp4"),
        "nvfp4 without rotation": recipe("nvfp4-unrotated"),
        "nvfp4 rounded to nearest": recipe("nvfp4-nearest"),
        "nvfp4, all rounded stochastically": recipe("nvfp4-random"),
        "nvfp4, last layer bf16": recipe("nvfp4", "fp8.last_layers_bf16=1"),
        "nvfp4, first layer bf16": recipe("nvfp4", "fp8.first_layers_bf16=1"),
        "nvfp4, bf16 from 82%": recipe("nvfp4", 'fp8.schedule=[[0.82, "bf16"]]'),
        "metis": recipe("metis"),
        "halo": recipe("halo"),
        "halo_int8": recipe("halo_int8"),
    }


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(variants())
    listed = ", ".join(names).replace("%", "%%")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds of each run (default: 1 2 3)")
    parser.add_argument("--runs", nargs="+", choices=names, default=names, metavar="RUN", help=listed)
    options = parser.parse_args()
    for key, change in PARTS.items():
        register(key, change)
    with tempfile.TemporaryDirectory() as folder:
        data = prepared(Path(folder))
        losses: dict[str, list[float]] = {}
        for name in options.runs:
            losses[name] = [loss(variants()[name], data, seed) for seed in options.seeds]
            print(f"{name}: {', '.join(f'{each:.4f}' for each in losses[name])}", flush=True)
    print(table(list(rows(losses)), ("run", "loss", "gap to bf16, nats", "worst seed")))


def prepared(folder: Path) -> Sequence[str]:
    """Make the data, and return the settings that name it."""
    make_corpus(Path(sysconfig.get_path("stdlib")), folder, 257)
    for split in ("train", "valid"):
        command = [
            "data",
            "prepare",
            f"{folder / split}.jsonl",
            "--output",
            f"{folder / split}",
            "--tokenizer",
            "bytes",
        ]
        if status := megascale(command):
            raise SystemExit(status)
    return f"data.train={folder / 'train'}", f"data.valid={folder / 'valid'}", "data.tokenizer=bytes"


def loss(words: Sequence[str], data: Sequence[str], seed: int) -> float:
    """Train a run, and return the mean loss of its last steps."""
    config, device = load_config(CONFIG, [*KEYS, *data, f"train.seed={seed}", *words]), detect_device(allow_gpu=False)
    run: Any = build_rank_run(config, open_mesh(Topology(), 0, tied=False), device, StopRequest())
    found = [train_step(run, run.train_loader.batch(run.progress.samples)).loss for _ in range(STEPS)]
    return statistics.fmean(found[-LAST:])


def rows(losses: Mapping[str, Sequence[float]]) -> Iterator[list[str]]:
    """Yield the table's rows."""
    for name, found in losses.items():
        gaps = [one - other for one, other in zip(found, losses.get("bf16", ()), strict=False)]
        of_bf16 = [f"{statistics.fmean(gaps):+.4f}", f"{max(gaps):+.4f}"] if gaps and name != "bf16" else ["", ""]
        yield [name, f"{statistics.fmean(found):.4f}", *of_bf16]


if __name__ == "__main__":
    main()
