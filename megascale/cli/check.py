"""`megascale check`: every mistake of a configuration, and memory per rank, in a fraction of a second without torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from megascale.account.host_limits import limit_findings, memory_findings
from megascale.account.memory import fullest_rank
from megascale.account.parameters import parameter_count
from megascale.cli.argument_types import positive_int
from megascale.cli.main import add_config_arguments
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.config.toml_writer import to_toml
from megascale.core.errors import ConfigError, Exit
from megascale.core.units import format_bytes, format_count


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_config_arguments(sub)
    sub.add_argument("--gpus", type=positive_int, metavar="N", help="check for a job of N processes")
    sub.add_argument("--show", action="store_true", help="print the resolved configuration")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    try:
        config = load_config(options.config, options.overrides, world_size=options.gpus)
    except ConfigError as error:
        if not options.json:
            raise
        print(json.dumps({"ok": False, "problems": [vars(problem) for problem in error.problems]}))
        return Exit.CONFIG
    notes = list(host_warnings(config))
    if options.json:
        rank = fullest_rank(config)
        state = {"weights": rank.parameters, "gradients": rank.gradients, "optimizer": rank.optimizer}
        facts = {"ok": True, "processes": config.world_size, "state_bytes": {**state, "total": sum(state.values())}}
        facts |= {"activation_bytes": {"total": rank.activations}, "transient_bytes": rank.transient}
        facts |= {"total_bytes": rank.total, "warnings": notes}
        print(json.dumps({**facts, "config": config.model_dump(by_alias=True, mode="json")}))
    elif options.show:
        print(to_toml(config), end="")
    else:
        print(summary(config))
    if not options.json:
        for note in notes:
            print(f"WARNING: {note}", file=sys.stderr)
    return Exit.OK


def host_warnings(config: RunConfig) -> Iterator[str]:
    """Describe limits of this host that a run would exceed here. The hosts of the run may have others. All ranks of a
    host count up to 8: a larger job usually has several hosts.
    """
    ranks = min(config.world_size, 8)
    for finding in (*limit_findings(config, ranks), *memory_findings(config, ranks)):
        yield f"this host  {finding.key}: {finding.message}  -> {finding.hint}"


def summary(config: RunConfig) -> str:
    """Describe the run in one line, and list the peak memory of the rank with the highest peak, by kind."""
    p, m = config.parallel, config.model
    layout = f"tp {p.tp}{' sp' if p.sp else ''} x pp {p.pp}{f' (vpp {p.vpp})' if p.vpp > 1 else ''} x dp {config.dp}"
    tokens = config.batch.total * m.seq_length
    rank = fullest_rank(config)
    kinds = {**vars(rank), "total": rank.total}
    memory = "\n".join(f"  {kind:<12}{format_bytes(size):>10}" for kind, size in kinds.items())
    return (
        f"{config.name}: {format_count(parameter_count(m))} parameters, {layout} = {config.world_size} processes, "
        f"{config.num_microbatches} micro-batches of {config.batch.micro}, {format_count(tokens)} tokens per step, "
        f"{format_count(tokens * config.train.steps)} in {config.train.steps} steps: no mistakes found\n"
        f"memory of the fullest rank\n{memory}"
    )
