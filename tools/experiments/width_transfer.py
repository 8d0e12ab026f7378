#!/usr/bin/env python3
"""Find the best learning rate of small models of several widths, in standard parametrization and with unit scaling,
whose rate should not depend on the width. Models of two layers predict the bytes of Python's own library, once each.
`--write` makes docs/results/width-transfer.md; about three minutes of two cores.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from curves import table

from megascale.config.loading import load_config_tree
from megascale.core.rank import Rank
from megascale.data.mix.loader import BatchShape, Loader
from megascale.data.mix.samples import Sample, SampleSource
from megascale.device import detect_device
from megascale.train.build import build_mesh, build_rank_run
from megascale.train.step import train_step
from megascale.train.stop import StopRequest

WIDTHS, BASE = (64, 128, 256, 512), 64
SEQUENCE, SAMPLES, HEAD_DIM = 64, 4, 32
MODEL = {
    "num_layers": 2, "vocab_size": 256, "seq_length": SEQUENCE, "position": "rope", "bias": False, "norm": "rmsnorm",
    "tie_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Parametrization:
    """Keys of `[model]`, and the exponents of 2 of the learning rates that are tried."""

    model: Mapping[str, Any]
    exponents: Sequence[int]


PARAMETRIZATIONS = {
    "standard": Parametrization({}, range(-12, -6)),
    "unit scaling": Parametrization(
        {"block": "post_norm", "unit_scaling": True, "mup_base_width": BASE}, range(-6, -1)
    ),
}


class Bytes(SampleSource):
    """Consecutive pieces of Python's library, as bytes."""

    def __init__(self, count: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        rows = np.frombuffer(text[: len(text) // (SEQUENCE + 1) * (SEQUENCE + 1)], np.uint8).reshape(-1, SEQUENCE + 1)
        self._rows = np.random.default_rng(0).permutation(rows)[:count].astype(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self._rows[index], np.ones(SEQUENCE, np.float32))


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS, help="default: 64 128 256 512")
    parser.add_argument("--steps", type=int, default=100, help="steps of a run (default: 100)")
    parser.add_argument("--write", action="store_true", help="write docs/results/width-transfer.md")
    options = parser.parse_args()
    runs = [(name, width, exponent, options.steps) for width in sorted(options.widths, reverse=True)
            for name, tried in PARAMETRIZATIONS.items() for exponent in tried.exponents]  # fmt: skip
    with ProcessPoolExecutor(2) as pool:  # the longest runs first
        found = dict(zip(runs, pool.map(final_loss, *zip(*runs, strict=True)), strict=True))
    parts = []
    for name, tried in PARAMETRIZATIONS.items():
        rates = [f"2^{exponent}" for exponent in tried.exponents]
        losses = {
            width: [found[name, width, exponent, options.steps] for exponent in tried.exponents]
            for width in options.widths
        }
        rows = [[width, *(f"{loss:.3f}" for loss in row), best(row, rates)] for width, row in losses.items()]
        parts.append(f"## {name.capitalize()}\n\n" + table(rows, ("width", *rates, "best")))
        print(parts[-1], flush=True)
    if options.write:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from results import write_page

        measured = (
            f"AdamW trains models of two layers for {options.steps} steps of {SAMPLES * SEQUENCE} bytes of Python's "
            f"library. A column is a learning rate, with unit scaling that of width {BASE}; a number is the mean loss "
            "of the last 20 steps, of one seed."
        )
        write_page("width-transfer", "The best learning rate by width", measured, parts)


def best(losses: Sequence[float], rates: Sequence[str]) -> str:
    """Return the rate of the lowest loss."""
    return rates[min(range(len(losses)), key=losses.__getitem__)]


def final_loss(name: str, width: int, exponent: int, steps: int) -> float:
    """Train a model of a width with the learning rate 2^exponent, and return the mean loss of the last 20 steps;
    infinity if it is not finite.
    """
    torch.set_num_threads(1)
    model, rate = PARAMETRIZATIONS[name].model, 2.0**exponent
    heads = {"num_heads": width // HEAD_DIM, "num_kv_heads": width // HEAD_DIM}
    tree = {
        "name": "width", "output_dir": tempfile.gettempdir(),
        "model": {**MODEL, "hidden_size": width, "ffn_size": 4 * width, **heads, **model},
        "batch": {"micro": SAMPLES, "global": SAMPLES}, "train": {"steps": steps, "precision": "fp32"},
        "optimizer": {"lr": rate, "min_lr": rate / 10, "warmup_steps": steps // 10, "weight_decay": 0.0},
        "data": {"mock": True}, "checkpoint": {"every": 0},
    }  # fmt: skip
    config, device = load_config_tree(tree, "width"), detect_device(allow_gpu=False)
    run = build_rank_run(config, build_mesh(config, Rank(0, 1, 0, "localhost"), device), device, StopRequest())
    shape = BatchShape(SAMPLES, SAMPLES, 1)
    loader = Loader(Bytes(steps * SAMPLES), shape, 0, dropout=0.0, seed=0, device=device.torch_device)
    losses = [train_step(run, loader.batch(step * SAMPLES)).loss for step in range(steps)]
    last = math.fsum(losses[-20:]) / 20
    return last if math.isfinite(last) else math.inf


if __name__ == "__main__":
    main()
