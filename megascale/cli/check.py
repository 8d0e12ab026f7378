"""`megascale check`: answers in a fraction of a second, without torch."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from megascale.cli.main import add_config_arguments
from megascale.cli.numbers import count
from megascale.config.explain import load
from megascale.config.resolved import to_toml
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Exit
from megascale.core.units import format_bytes, format_count
from megascale.plan.memory import fullest_rank
from megascale.plan.params import parameter_count


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_config_arguments(sub)
    sub.add_argument("--gpus", type=count, metavar="N", help="check for a job of N processes")
    sub.add_argument("--show", action="store_true", help="print the resolved configuration")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    try:
        config = load(options.config, options.overrides, world=options.gpus)
    except ConfigError as error:
        if not options.json:
            raise
        print(json.dumps({"ok": False, "problems": [vars(problem) for problem in error.problems]}))
        return Exit.CONFIG
    if options.json:
        fullest = fullest_rank(config)
        state = {**asdict(fullest.state), "total": fullest.state.total}
        activations = {**asdict(fullest.activations), "total": fullest.activations.total}
        facts = {"ok": True, "processes": config.world, "state_bytes": state, "activation_bytes": activations}
        facts |= {"peak_bytes": {**asdict(fullest.peak), "total": fullest.peak.total}, "total_bytes": fullest.total}
        print(json.dumps({**facts, "config": config.model_dump(by_alias=True, mode="json")}))
    elif options.show:
        print(to_toml(config), end="")
    else:
        print(summary(config))
    return Exit.OK


def summary(config: RunConfig) -> str:
    """What would run, and the room that it takes."""
    p, m = config.parallel, config.model
    layout = f"tp {p.tp}{' sp' if p.sp else ''} x pp {p.pp}{f' (vpp {p.vpp})' if p.vpp > 1 else ''} x dp {config.dp}"
    tokens = config.batch.total * m.seq_length
    fullest = fullest_rank(config)
    return (
        f"{config.name}: {format_count(parameter_count(m))} parameters, {layout} = {config.world} processes, "
        f"{config.micro_batches} micro-batches of {config.batch.micro}, {format_count(tokens)} tokens a step, "
        f"{format_count(tokens * config.train.steps)} in {config.train.steps} steps: no mistakes found\n"
        f"weights, gradients and optimizer take {format_bytes(fullest.state.total)} on the fullest rank, "
        f"activations {format_bytes(fullest.activations.total)}, all with what operations need while they run at most "
        f"{format_bytes(fullest.total)}"
    )
