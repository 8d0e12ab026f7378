"""`megascale plan batch`: the critical batch of a training, measured or by a law, and a ramp-up for it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megascale.cli.arguments import add_config_arguments, add_json, float_within, positive_int
from megascale.cli.plan_output import print_tables
from megascale.config.loading import load_config
from megascale.core.errors import Exit
from megascale.core.named_run import check_run
from megascale.core.run_folder import METRICS_FILE
from megascale.layout.parameters import parameter_count
from megascale.plan.search.batch_plan import BatchPlan, batch_json, batch_tables, critical_by_law, read_measured

TOKENS = (1.0, 1e15)
"""Fewest and most tokens of a training: the law ends far below the most, and steps and batches stay countable."""

LOSSES = (0.3, 20.0)
"""Least and largest loss, in nats per token: of text that is easily predicted, and of more than a random guess."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(sub)
    measured = "folder of a run with train.noise_scale_every, whose noise scale is the critical batch"
    sub.add_argument("--run", metavar="RUN", type=Path, dest="measured", help=f"{measured} (default: by a law)")
    tokens = "tokens of the training, such as 300e9 (default: train.steps with their batches)"
    sub.add_argument("--tokens", type=float_within(*TOKENS, "no training has more"), metavar="T", help=tokens)
    loss = "loss at the end, in nats per token, for the law of Kaplan et al. (default: as Hoffmann et al. predict)"
    why = "give the loss in nats per token; the law holds for no other"
    sub.add_argument("--loss", type=float_within(*LOSSES, why), metavar="L", help=loss)
    gpus = "number of devices, for dp (default: the fewest that the layout needs)"
    sub.add_argument("--gpus", type=positive_int, metavar="N", help=gpus)
    add_json(sub)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    config = load_config(options.config, options.overrides, options.gpus, skip_sections=["data"], world_option="--gpus")
    tokens = options.tokens or float(config.samples * config.model.seq_length)
    critical = critical_by_law(parameter_count(config.model), tokens, options.loss)
    source = "by the law of Kaplan et al."
    if options.measured:
        check_run(options.measured)
        critical = read_measured(options.measured / METRICS_FILE).critical
        source = f"from the noise scale of {options.measured}"
    plan = BatchPlan(config, tokens, critical, source)
    if options.json:
        print(json.dumps(batch_json(plan)))
    else:
        print_tables(batch_tables(plan))
    return Exit.OK
