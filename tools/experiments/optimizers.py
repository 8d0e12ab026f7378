#!/usr/bin/env python3
"""Compare optimizers on the quickstart model of 10 million parameters and its corpus: equal tokens, a small sweep of
learning rates with the first seed, then the best rate with all seeds.

`make quickstart` makes the data. Finished runs are not repeated: give another --output after a change of keys; the
checkpoints of all runs take about 6 GB. `--small` shows the steps in minutes, on made-up data: its losses mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from curves import ONE_PROCESS, Curve, draw, path, plan, table

from megascale.catalog.optimizers import OPTIMIZERS

CONFIG, SMALL = "configs/quickstart.toml", "tools/experiments/optimizers_small.toml"

KEYS = (*ONE_PROCESS, "batch.micro=4", "batch.global=16", "checkpoint.every=1000000")
"""Changes: one process, a batch of 4096 tokens of the quickstart, and a checkpoint at the end only."""

RULES = ("adamw", "muon", "came", "sinkgd", "spam", "conda", "galore")

RATES = {"adamw": 2e-3, "muon": 2e-3, "came": 2e-3, "sinkgd": 2e-3, "spam": 2e-3, "conda": 2e-3, "galore": 8e-3}
"""The rate in the middle of the sweep; of other rules AdamW's."""

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Rates of the sweep, relative to the middle."""

HEAD = ("optimizer", "learning rate", "validation loss", "worst and best seed", "against AdamW, by seed")


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds with the best rate (1 2 3)")
    parser.add_argument("--steps", type=int, default=600, help="steps of a run (default: 600, 2.5 million tokens)")
    parser.add_argument("--rules", nargs="+", choices=OPTIMIZERS.names(), default=RULES, metavar="RULE",
                        help=f"default: {' '.join(RULES)}")  # fmt: skip
    parser.add_argument("--factors", nargs="+", type=float, default=FACTORS, metavar="F",
                        help="rates of the sweep, relative to the middle (default: 0.25 0.5 1 2 4)")  # fmt: skip
    parser.add_argument("--small", action="store_true", help="a tiny model, 8 steps, two rates, one seed")
    parser.add_argument("--output", type=path, default="runs/optimizers", metavar="DIR", help="folder of the runs")
    parser.add_argument("--picture", type=path, metavar="FILE.svg", help="plot the curves")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings of every run")
    options = parser.parse_intermixed_args()
    full = (options.steps, options.seeds, options.factors)
    steps, seeds, factors = (8, options.seeds[:1], FACTORS[2:4]) if options.small else full
    runs = Runs(SMALL if options.small else CONFIG, options.output, steps, options.words)
    curves: dict[str, list[Curve]] = {}
    rates: dict[str, float] = {}
    for rule in dict.fromkeys(options.rules):
        rates[rule] = runs.best_rate(rule, seeds[0], factors)
        curves[rule] = [runs.train(rule, rates[rule], seed) for seed in seeds]
        print(table(list(rows(curves, rates)), HEAD), flush=True)
    if options.picture:
        draw(curves, "Optimizers on the quickstart model", options.picture)


@dataclass(frozen=True)
class Runs:
    """Runs of `steps` of one configuration with settings `words`, in subfolders of `output`."""

    config: str
    output: Path
    steps: int
    words: Sequence[str]

    def train(self, rule: str, rate: float, seed: int) -> Curve:
        """Train a run, or read a finished one."""
        words = [*KEYS, f"train.steps={self.steps}", f"train.eval_every={max(1, self.steps // 12)}",
                 f"train.seed={seed}", f"optimizer.name={rule}", f"optimizer.lr={rate:g}",
                 f"optimizer.min_lr={rate / 10:g}", f"optimizer.warmup_steps={self.steps // 10}"]  # fmt: skip
        words += [*self.options(rule), *self.words]
        name = f"{rule}-{rate:g}-{seed}"
        return plan(self.config, self.output, {name: words})[name].train()

    def options(self, rule: str) -> list[str]:
        """Options of a rule that suit short runs: their defaults are for a hundred thousand steps."""
        gap = max(1, self.steps // 12)
        short = {
            "conda": f"{{update_gap = {gap}}}",
            "galore": f"{{rank = 64, update_gap = {gap}}}",
            "spam": f"{{reset_every = {4 * gap}, rewarmup = {gap}}}",
        }
        return [f"optimizer.options={short[rule]}"] if rule in short else []

    def best_rate(self, rule: str, seed: int, factors: Sequence[float]) -> float:
        """Return the learning rate with the lowest last validation loss."""
        middle = RATES.get(rule, RATES["adamw"])
        losses = {middle * factor: self.train(rule, middle * factor, seed).last for factor in factors}
        best = min(losses, key=lambda rate: losses[rate])
        if best in (min(losses), max(losses)):
            print(f"{rule}: the best rate, {best:g}, is at an end of the sweep", flush=True)
        return best


def rows(curves: Mapping[str, list[Curve]], rates: Mapping[str, float]) -> Iterator[list[str]]:
    """Yield the table's rows: the last validation loss of every rule, its mean over seeds, and its difference from
    AdamW's with the same seed, which orders the samples of training and of validation.
    """
    for rule, group in curves.items():
        losses = [curve.last for curve in group]
        pairs = zip(group, curves.get("adamw", group), strict=True)
        differences = [curve.last - base.last for curve, base in pairs]
        yield [
            rule,
            f"{rates[rule]:g}",
            f"{statistics.mean(losses):.4f}",
            f"{max(losses):.4f}, {min(losses):.4f}",
            f"{statistics.mean(differences):+.3f} ({min(differences):+.3f} to {max(differences):+.3f})",
        ]


if __name__ == "__main__":
    main()
