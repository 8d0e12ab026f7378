#!/usr/bin/env python3
"""What MegaScale's three changes to the algorithm do to the loss (paper, 3.1 and 6.2), on a small GPT: the parallel
block, then a sliding window too, then LAMB with four times the batch on the same number of tokens.

`make quickstart` makes the data. Runs that are done are not run again: after a change of keys give another
--output.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

from curves import Curve, draw, path, plan, table

CONFIG = "tools/experiments/megascale_recipe.toml"
TIMES = 4
"""How many times larger the batch of LAMB is."""


HEAD = ("variant", "validation loss", "worst and best seed", "against the baseline")


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of each variant (1 2 3)")
    parser.add_argument("--steps", type=int, default=800, help="of the smaller batch (800)")
    parser.add_argument("--window", type=int, default=64, help="keys that a query sees (64 of 256)")
    parser.add_argument("--lr", type=float, default=4e-2, help="LAMB's learning rate (0.04)")
    parser.add_argument("--output", type=path, default="runs/recipe", metavar="DIR", help="of the runs")
    parser.add_argument("--picture", type=path, metavar="FILE.svg", help="draw the curves")
    options = parser.parse_args()
    found = variants(options.steps, options.window, options.lr)
    keys = {f"{name}-{seed}": [*found[name], f"train.seed={seed}"] for name in found for seed in options.seeds}
    planned = plan(CONFIG, options.output, keys)
    curves: dict[str, list[Curve]] = {}
    for name in found:
        curves[name] = [planned[f"{name}-{seed}"].train() for seed in options.seeds]
        print(table(list(rows(curves)), HEAD), flush=True)
    if options.picture:
        draw(curves, "MegaScale's algorithm on a small GPT", options.picture)


def variants(steps: int, window: int, lr: float) -> dict[str, list[str]]:
    """The keys of each variant: what it adds to the one before."""
    parallel = [f"train.steps={steps}", f"train.eval_every={steps // 10}", "model.block=parallel"]
    windowed = [*parallel, f"model.window={window}"]
    large = [
        *windowed, "optimizer.name=lamb", f"optimizer.lr={lr}", f"optimizer.min_lr={lr / 10}",
        f"batch.global={8 * TIMES}", f"optimizer.warmup_steps={40 // TIMES}",
        f"train.steps={steps // TIMES}", f"train.eval_every={steps // TIMES // 10}",
    ]  # fmt: skip
    return {"baseline": parallel[:2], "parallel-block": parallel, "and-window": windowed, "and-lamb-4x": large}


def rows(curves: dict[str, list[Curve]]) -> Iterator[list[str]]:
    """The table's rows: the last validation loss of each variant, in the mean over seeds."""
    base = statistics.mean(curve.last for curve in curves["baseline"])
    for name, group in curves.items():
        last = sorted(curve.last for curve in group)
        mean = statistics.mean(last)
        yield [name, f"{mean:.4f}", f"{last[-1]:.4f}, {last[0]:.4f}", f"{mean / base - 1:+.2%}"]


if __name__ == "__main__":
    main()
