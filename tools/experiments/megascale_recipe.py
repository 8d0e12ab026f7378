#!/usr/bin/env python3
"""Effect of MegaScale's three changes to the algorithm on the loss of a small GPT (paper, 3.1 and 6.2): the parallel
block, then also a sliding window, then also LAMB with four times the batch on the same number of tokens.

`make quickstart` makes the data. Finished runs are not repeated: give another --output after a change of keys.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

from curves import Curve, draw, path, plan, table

CONFIG = "tools/experiments/megascale_recipe.toml"
TIMES = 4
"""Batch size with LAMB divided by the batch size with AdamW."""


HEAD = ("variant", "validation loss", "worst and best seed", "against the baseline")


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds per variant (default: 1 2 3)")
    parser.add_argument("--steps", type=int, default=800, help="steps with the smaller batch (default: 800)")
    parser.add_argument("--window", type=int, default=64, help="keys per query (default: 64 of 256)")
    parser.add_argument("--lr", type=float, default=4e-2, help="LAMB's learning rate (default: 0.04)")
    parser.add_argument("--output", type=path, default="runs/recipe", metavar="DIR", help="folder of the runs")
    parser.add_argument("--picture", type=path, metavar="FILE.svg", help="plot the curves")
    options = parser.parse_args()
    by_variant = variants(options.steps, options.window, options.lr)
    keys = {
        f"{name}-{seed}": [*by_variant[name], f"train.seed={seed}"] for name in by_variant for seed in options.seeds
    }
    planned = plan(CONFIG, options.output, keys)
    curves: dict[str, list[Curve]] = {}
    for name in by_variant:
        curves[name] = [planned[f"{name}-{seed}"].train() for seed in options.seeds]
        print(table(list(rows(curves)), HEAD), flush=True)
    if options.picture:
        draw(curves, "MegaScale's algorithm on a small GPT", options.picture)


def variants(steps: int, window: int, lr: float) -> dict[str, list[str]]:
    """Return the overrides of every variant; each extends the variant before."""
    parallel = [f"train.steps={steps}", f"train.eval_every={steps // 10}", "model.block=parallel"]
    windowed = [*parallel, f"model.window={window}"]
    large = [
        *windowed, "optimizer.name=lamb", f"optimizer.lr={lr}", f"optimizer.min_lr={lr / 10}",
        f"batch.global={8 * TIMES}", f"optimizer.warmup_steps={40 // TIMES}",
        f"train.steps={steps // TIMES}", f"train.eval_every={steps // TIMES // 10}",
    ]  # fmt: skip
    return {"baseline": parallel[:2], "parallel-block": parallel, "and-window": windowed, "and-lamb-4x": large}


def rows(curves: dict[str, list[Curve]]) -> Iterator[list[str]]:
    """Yield the table's rows: the last validation loss of every variant, with the mean over seeds."""
    base = statistics.mean(curve.last for curve in curves["baseline"])
    for name, group in curves.items():
        last = sorted(curve.last for curve in group)
        mean = statistics.mean(last)
        yield [name, f"{mean:.4f}", f"{last[-1]:.4f}, {last[0]:.4f}", f"{mean / base - 1:+.2%}"]


if __name__ == "__main__":
    main()
