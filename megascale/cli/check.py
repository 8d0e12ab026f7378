"""`megascale check`: every mistake of a configuration, and memory per rank, in a fraction of a second without torch."""

from __future__ import annotations

import argparse
import json

from megascale.cli.arguments import add_config_arguments, add_json, positive_int
from megascale.cli.check_run import check_plug_in_schedule, host_warnings
from megascale.cli.check_summary import memory_facts, summary
from megascale.cli.command_output import warn
from megascale.cli.initial_model import compare_initial_model
from megascale.cli.rank_config import check_fault_ranks
from megascale.cli.run_lock import refuse_second_run
from megascale.config.loading import load_config
from megascale.config.toml_writer import to_toml
from megascale.core.errors import ConfigError, Exit


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(sub)
    sub.add_argument("--gpus", type=positive_int, metavar="N", help="check for a job of N processes")
    sub.add_argument("--show", action="store_true", help="print the resolved configuration")
    add_json(sub)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    try:
        config = load_config(options.config, options.overrides, world_size=options.gpus, world_option="--gpus")
        also = "" if options.gpus else ", or --gpus for more processes"
        check_fault_ranks(config.fault, config.world_size, also)
        refuse_second_run(config.folder, config.checkpoint.resume)
        check_plug_in_schedule(config)
        if limit := config.train.memory_limit:
            from megascale.plan.search.memory_policy import refuse_small_limit  # other checks load no planner

            refuse_small_limit(config, limit)
        changes = compare_initial_model(config)
    except ConfigError as error:
        if not options.json:
            raise
        print(json.dumps({"ok": False, "problems": [vars(problem) for problem in error.problems]}))
        return Exit.CONFIG
    notes = list(host_warnings(config))
    if options.json:
        facts = {"ok": True, "processes": config.world_size, **memory_facts(config)}
        facts |= {"warnings": notes, "changes": changes}
        print(json.dumps({**facts, "config": config.model_dump(by_alias=True, mode="json")}))
        return Exit.OK
    print(to_toml(config) if options.show else "\n".join([summary(config), *changes, ""]), end="")
    warn(notes)
    return Exit.OK
