#!/usr/bin/env python3
"""Train the quickstart model in fp32, in bf16 and with every fp8 recipe, from the same weights on the same tokens, and
compare their validation losses. `make quickstart` makes the data. Runs that are done are not run again:
after a change of keys give another --output.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from curves import ONE_PROCESS, Curve, draw, path, plan, table

from megascale.catalog.recipes import RECIPES

CONFIG = "configs/quickstart.toml"
KEYS = (*ONE_PROCESS, "batch.global=4", "optimizer.lr=5e-4", "optimizer.min_lr=5e-5", "optimizer.warmup_steps=100",
        "train.eval_every=50", "train.eval_steps=16", "checkpoint.every=100")  # fmt: skip
"""What differs from the quickstart: one process, and a smaller batch and rate, with which runs that differ by rounding
alone stay together.
"""

WIDE = {"bf16": ("train.precision=bf16",), "bf16 otherwise rounded": ("train.precision=bf16", "batch.micro=4"),
        "fp32": ("train.precision=fp32",)}  # fmt: skip
"""What the recipes are to be compared with; the second forms the sums of gradients over other micro-batches."""


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="of each run (500)")
    names = [*WIDE, *RECIPES.names()]
    parser.add_argument("--runs", nargs="+", choices=names, default=names, metavar="RUN", help=", ".join(names))
    parser.add_argument("--output", type=path, default="runs/fp8", metavar="DIR", help="of the runs (runs/fp8)")
    parser.add_argument("--picture", type=path, metavar="FILE.svg", help="draw the curves")
    options = parser.parse_args()
    folders = {name.replace(" ", "-"): name for name in options.runs}
    own = {folder: WIDE.get(name) or ("train.precision=fp8", f"fp8.recipe={name}") for folder, name in folders.items()}
    steps = f"train.steps={options.steps}"
    planned = plan(CONFIG, options.output, {folder: (*KEYS, steps, *keys) for folder, keys in own.items()})
    curves: dict[str, Curve] = {}
    for folder, name in folders.items():
        curves[name] = planned[folder].train()
        print(table(list(rows(curves)), ("numbers", "validation loss", "against bf16")), flush=True)
    if options.picture:
        draw(
            {name: [curve] for name, curve in curves.items()}, "8-bit products on the quickstart model", options.picture
        )


def rows(curves: dict[str, Curve]) -> Iterator[list[str]]:
    """The table's rows: the last validation loss of each run."""
    for name, curve in curves.items():
        against = f"{curve.last / curves['bf16'].last - 1:+.2%}" if "bf16" in curves else ""
        yield [name, f"{curve.last:.4f}", against]


if __name__ == "__main__":
    main()
