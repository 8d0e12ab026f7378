"""`megascale plan`: estimates of memory, step time and MFU, and search for layouts. Only --exact imports torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import replace
from typing import Any

from megascale.cli import plan_options
from megascale.cli.plan_options import LEAVE_OUT_EXACT, check_options, failure_cost, machine_of
from megascale.cli.plan_output import print_tables, write_files
from megascale.cli.plan_search import advice, find_layouts, planned_config, report_no_fit, search_layouts, swept_configs
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.core.process import without_gc
from megascale.plan.search import report
from megascale.plan.search.plan import Plan

add_arguments = plan_options.add_arguments


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status: `Exit.CONFIG` for a run that does not fit in memory."""
    # a plan allocates many tuples, none in a cycle
    with contextlib.nullcontext() if options.exact else without_gc():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    hardware, stack = machine_of(options)
    check_options(options)
    swept = swept_configs(options)
    found = find_layouts(options, hardware, stack) if options.search else None
    if found and not found.best:
        return report_no_fit(options, found)
    planned = found.best[0] if found else Plan.of(planned_config(options, options.gpus), hardware, stack)
    config = planned.config
    alternative = None
    if options.exact:
        from megascale.plan.dryrun.exact_costs import exact_costs  # imports torch

        if config.train.quantizes and stack.fp8_weights == "instead":
            message = f"{stack.name} stores FP8 weights instead of bf16 ones, this trainer stores both"
            raise ConfigError([Problem("command line", "--exact", message, LEAVE_OUT_EXACT)])
        planned = replace(planned, exact=exact_costs(config, planned.memory_by_stage))
    sweep = [Plan.of(config, hardware, stack) for config in swept]
    if not planned.fits:
        alternative = advice(options, search_layouts(options, config, config.world_size, hardware, stack, results=1))
    write_files(options, planned, sweep)
    cost = failure_cost(options, config.world_size)
    if options.json:
        extra: dict[str, Any] = {"search": report.search_json(found)} if found else {}
        extra |= {"suggestion": alternative} if alternative else {}
        print(json.dumps({**report.plan_json(planned, sweep, options.tokens, cost), **extra}))
    else:
        print_tables(report.search_tables(found) if found else ())
        print_tables(report.tables(planned, sweep, options.tokens, cost))
    if alternative is None:
        return Exit.OK
    print(f"{report.too_large_message(planned)}; {alternative}", file=sys.stderr)
    return Exit.CONFIG
