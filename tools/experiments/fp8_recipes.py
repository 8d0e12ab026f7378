#!/usr/bin/env python3
"""Train the quickstart model in fp32, in bf16 and with every FP8 recipe, from the same weights on the same tokens, and
compare the validation losses. `make quickstart` makes the data. Finished runs are not repeated: give another --output
after a change of keys.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from curves import ONE_PROCESS, Curve, draw, path, plan, table

from megascale.catalog.recipes import RECIPES

CONFIG = "configs/quickstart.toml"
KEYS = (*ONE_PROCESS, "batch.global=4", "optimizer.lr=5e-4", "optimizer.min_lr=5e-5", "optimizer.warmup_steps=100",
        "train.eval_every=50", "train.eval_steps=16", "checkpoint.every=100")  # fmt: skip
"""Changes to the quickstart: one process, and a smaller batch and learning rate, with which runs that differ only in
rounding do not diverge.
"""

WIDE = {"bf16": ("train.precision=bf16",), "bf16, other micro-batch": ("train.precision=bf16", "batch.micro=4"),
        "fp32": ("train.precision=fp32",)}  # fmt: skip
"""Baselines. The second bf16 run accumulates gradients over other micro-batches, to show the effect of rounding."""


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="steps per run (default: 500)")
    names = [*WIDE, *RECIPES.names()]
    parser.add_argument("--runs", nargs="+", choices=names, default=names, metavar="RUN", help=", ".join(names))
    parser.add_argument(
        "--output", type=path, default="runs/fp8", metavar="DIR", help="folder of the runs (default: runs/fp8)"
    )
    parser.add_argument("--picture", type=path, metavar="FILE.svg", help="plot the curves")
    options = parser.parse_args()
    folders = {name.replace(", ", "-").replace(" ", "-"): name for name in options.runs}
    overrides = {
        folder: WIDE.get(name) or ("train.precision=fp8", f"fp8.recipe={name}") for folder, name in folders.items()
    }
    steps = f"train.steps={options.steps}"
    planned = plan(CONFIG, options.output, {folder: (*KEYS, steps, *keys) for folder, keys in overrides.items()})
    curves: dict[str, Curve] = {}
    for folder, name in folders.items():
        curves[name] = planned[folder].train()
        print(table(list(rows(curves)), ("precision", "validation loss", "against bf16")), flush=True)
    if options.picture:
        baseline = "bf16" if "bf16" in curves else ""
        groups = {name: [curve] for name, curve in curves.items()}
        draw(groups, "FP8 GEMMs on the quickstart model", options.picture, baseline)


def rows(curves: dict[str, Curve]) -> Iterator[list[str]]:
    """Yield the table's rows: the last validation loss of every run."""
    for name, curve in curves.items():
        against = f"{curve.last / curves['bf16'].last - 1:+.2%}" if "bf16" in curves else ""
        yield [name, f"{curve.last:.4f}", against]


if __name__ == "__main__":
    main()
