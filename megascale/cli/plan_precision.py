"""`megascale plan precision`: the loss of a training by the format of its GEMMs, and its critical tokens."""

from __future__ import annotations

import argparse
import json

from megascale.cli.arguments import add_config_arguments, add_json, at_least, float_within
from megascale.cli.plan_batch import TOKENS
from megascale.cli.plan_output import print_tables
from megascale.config.loading import load_config
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.layout.blocks import distinct_blocks, linears
from megascale.plan.search.precision_law import PrecisionLaw, precision_json, precision_tables


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(sub)
    tokens = "tokens of the training, such as 300e9 (default: train.steps with their batches)"
    sub.add_argument("--tokens", type=float_within(*TOKENS, "no training has more"), metavar="T", help=tokens)
    block = "elements of a row that share a scale; about 9,000 stands for a whole row (default: 128)"
    share = at_least(2, "an element alone loses nothing")
    sub.add_argument("--block", type=share, metavar="B", default=128, help=block)
    add_json(sub)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    config = load_config(options.config, options.overrides, skip_sections=["data"])
    if config.model.experts:
        message = f"is {config.model.experts}, and the law was fitted on dense models"
        raise ConfigError([Problem("command line", "model.experts", message, "plan a dense model")])
    blocks, numbers = distinct_blocks(config.model)
    weights = sum(layer.weight_numel for number in numbers for layer in linears(blocks[number]))
    tokens = options.tokens or float(config.samples * config.model.seq_length)
    law = PrecisionLaw(weights, tokens, options.block)
    if options.json:
        print(json.dumps(precision_json(config.name, law)))
    else:
        print_tables(precision_tables(config.name, law))
    return Exit.OK
