"""Estimated milliseconds of a step by kind of kernel, in bf16 and every FP8 recipe, beside those measured in bf16.
GEMMs, attention and the optimizer are the planner's; other kernels move their bytes (`operator-bytes`) at its
bandwidth. Writes the table into the page of the measurement.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from lab.commands.operator_bytes import BF16, CONFIG, WEIGHTS, count, recipe_config
from megascale.catalog.recipes import RECIPES
from megascale.core.files import write_text
from megascale.layout.tensors import padded_vocab
from megascale.plan.simulate import profiles
from megascale.plan.simulate.step_time import StepParts
from megascale.train.kernels import ALL_PURPOSES, classify
from results import RESULTS, filled, own_command, pipes

PAGE, REGION = RESULTS / "gpu.md", "estimates"
PLANNED = ("gemm", "attention", "optimizer")
GENERATION = 2025  # of the libraries
LOSS_PASSES = 3  # over the logits, in bf16: the statistics read them, the gradient reads and writes them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--config", default=CONFIG, metavar="FILE", help="default %(default)s")
    parser.add_argument("--hardware", default="h200", help="profile of the device; default %(default)s")
    parser.add_argument("--attention", default="flash3", help="kernel of attention; default %(default)s")


def run(options: argparse.Namespace) -> int:
    """Write the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    columns = {"measured, bf16": measured(text)}
    columns |= {name: estimate(options, name) for name in (BF16, *RECIPES.names())}
    names = dict.fromkeys(name for each in columns.values() for name in each)
    rows = [[name, *(f"{each[name]:.1f}" if each.get(name) else "" for each in columns.values())] for name in names]
    sums = ["all", *(f"{sum(each.values()):.1f}" for each in columns.values())]
    caption = (
        "Milliseconds of a step by kind of kernel: measured in bf16, as above, and **estimated** for "
        f"{options.hardware} by `{own_command()}`, with attention by {options.attention}. No estimate was measured."
    )
    table = pipes(["kernels", *columns], *rows, sums)
    write_text(PAGE, filled(text, REGION, "\n".join([caption, "", *table]), PAGE))
    return 0


def measured(text: str) -> dict[str, float]:
    """Return the measured milliseconds by kind of kernel, from the page's shares of a step in bf16."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    step = next(float(row[3]) for row in rows if row[1:3] == [BF16, "megascale"])
    place, head = next((place, row) for place, row in enumerate(rows) if row[0] == "megascale's step")
    shares = next(row for row in rows[place + 1 :] if row[1] == BF16)
    pairs = zip(head, shares, strict=True)
    return {name: step * float(share.rstrip("%")) / 100 for name, share in pairs if share.endswith("%")}


def estimate(options: argparse.Namespace, recipe: str) -> dict[str, float]:
    """Estimate the milliseconds of a step by kind of kernel."""
    config = recipe_config(options.config, recipe)
    stack = profiles.stack("megascale").model_copy(update={"attention": options.attention, "generation": GENERATION})
    parts = StepParts(config, profiles.hardware(options.hardware), stack)
    seconds, stream = defaultdict[str, float](float), parts.layers.kernels.stream
    for launch in count(config):
        times = config.model.num_layers * (1 if launch.name == WEIGHTS else config.num_microbatches)
        purpose = "quantise" if launch.name == WEIGHTS else classify(f"aten::{launch.name}")
        seconds[purpose] += times * stream(launch.read + launch.written)
    logits = parts.layers.tokens * padded_vocab(config.model, 1)
    seconds["loss"] += config.num_microbatches * stream(LOSS_PASSES * logits * parts.layers.kernels.bytes)
    seconds |= {name: parts.estimate.causes[name] for name in PLANNED}
    return {name: 1e3 * seconds[name] for name in ALL_PURPOSES if name in seconds}
