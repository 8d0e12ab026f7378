#!/usr/bin/env python3
"""Train the quickstart model in bf16 and with every fp8 recipe, from the same weights on the same tokens, and compare
their validation losses. `make quickstart` makes the data. Runs that are done are not run again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from curves import ONE_PROCESS, draw, table, train

from megascale.catalog.recipes import RECIPES

CONFIG = "configs/quickstart.toml"


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="of each run (500)")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES.names(), default=RECIPES.names(), metavar="RECIPE")
    parser.add_argument("--output", type=Path, default=Path("runs/fp8"), metavar="DIR", help="of the runs (runs/fp8)")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the curves")
    options = parser.parse_args()
    keys = (*ONE_PROCESS, f"train.steps={options.steps}", "train.eval_every=50", "train.eval_steps=16")
    curves = {"bf16": train(CONFIG, "bf16", options.output, (*keys, "checkpoint.every=100", "train.precision=bf16"))}
    rows = [["bf16", f"{curves['bf16'].last:.4f}", ""]]
    for recipe in options.recipes:
        eight = ("checkpoint.every=100", "train.precision=fp8", f"fp8.recipe={recipe}")
        curves[recipe] = train(CONFIG, recipe, options.output, (*keys, *eight))
        against = curves[recipe].last / curves["bf16"].last - 1
        rows.append([recipe, f"{curves[recipe].last:.4f}", f"{against:+.2%}"])
        print(table(rows, ("numbers", "validation loss", "against bf16")), flush=True)
    if options.picture:
        draw(
            {name: [curve] for name, curve in curves.items()}, "8-bit products on the quickstart model", options.picture
        )


if __name__ == "__main__":
    main()
