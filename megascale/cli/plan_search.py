"""The configurations that `megascale plan` plans: as given, for several numbers of devices, and the fastest layouts."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from rich.console import Console

from megascale.cli.plan_options import failure_cost
from megascale.config.loading import load_config
from megascale.config.run import RunConfig
from megascale.config.section import AUTO
from megascale.config.toml_reader import read_toml
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.plan.search import report
from megascale.plan.search.search import SearchResult, search
from megascale.plan.search.space import DEPENDENT_KEYS, LAYOUT_KEYS
from megascale.plan.simulate.profiles import Hardware, Stack


def planned_config(options: argparse.Namespace, gpus: int | None, *, layout: bool = True) -> RunConfig:
    """Load CONFIG for `gpus` devices, without a check of its data; without `layout`, of its parallelism either."""
    unchecked = ["data"] if layout else ["data", "parallel"]
    option = "--gpus" if gpus == options.gpus else "--sweep"
    words = options.overrides
    return load_config(options.config, words, world_size=gpus, skip_sections=unchecked, world_option=option)


def swept_configs(options: argparse.Namespace) -> list[RunConfig]:
    """Load a configuration for each number of devices of --sweep, in ascending order.

    Raises: ConfigError with the mistakes for every number of devices
    """
    configs, problems = [], list[Problem]()
    for gpus in sorted(set(options.sweep)):
        try:
            configs.append(planned_config(options, gpus))
        except ConfigError as error:
            problems += [replace(problem, where=f"--sweep {gpus}: {problem.where}") for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return configs


def find_layouts(options: argparse.Namespace, hardware: Hardware, stack: Stack) -> SearchResult:
    """Find the fastest layouts. Keys set on the command line stay fixed; the layout of CONFIG need not be legal.

    Raises: ConfigError for a configuration whose layouts have no time
    """
    config = planned_config(options, None, layout=False)
    if config.parallel.hybrid_dp:
        what = "the time of hybrid_dp depends on the lengths of documents, and --search plans with one length"
        raise ConfigError([Problem(options.config, "parallel.hybrid_dp", what, "megascale plan lengths plans both")])
    if config.parallel.skip_ratio:
        what = "pp says which layers are skipped, and --search compares layouts that train the same model"
        raise ConfigError([Problem(options.config, "parallel.skip_ratio", what, "0, or plan without --search")])
    return search_layouts(options, config, options.gpus, hardware, stack)


def search_layouts(
    options: argparse.Namespace, config: RunConfig, devices: int, hardware: Hardware, stack: Stack, results: int = 10
) -> SearchResult:
    """Search, and say in a line that is rewritten how far the search is, if stderr is a terminal."""
    with Console(stderr=True).status("layouts") as status:
        return search(config, devices, hardware, stack, fixed_keys(options), results=results, tell=status.update)


def report_no_fit(options: argparse.Namespace, search_result: SearchResult) -> int:
    """Print why no layout fits, with the plan of the layout that needs the least memory.

    Raises: ConfigError if no layout is legal because CONFIG has a mistake
    """
    if search_result.counts["legal"] == 0:
        planned_config(options, None)
    hint, smallest = advice(options, search_result), search_result.smallest
    if options.json:
        plan: dict[str, Any] = {}
        if smallest:
            cost = failure_cost(options, smallest.config.world_size)
            plan = report.plan_json(smallest, [], options.tokens, cost)
        print(json.dumps({**plan, "fits": False, "suggestion": hint, "search": report.search_json(search_result)}))
    print(hint, file=sys.stderr)
    return Exit.CONFIG


def advice(options: argparse.Namespace, search_result: SearchResult) -> str:
    """Describe the layouts that fit, as settings of the command line."""
    dp_setting = read_toml(options.config, options.overrides).tree.get("parallel", {}).get("dp", AUTO)
    count = "parallel.dp" if dp_setting != AUTO else None if options.gpus else "--gpus"
    return report.advice(search_result, fixed_keys(options), count)


def fixed_keys(options: argparse.Namespace) -> list[str]:
    """List the layout's keys that the command line sets."""
    settings = dict(text.replace(" ", "").split("=", 1) for text in options.overrides)
    return [key for key in (*LAYOUT_KEYS, *DEPENDENT_KEYS) if settings.get(key, AUTO).strip("\"'") != AUTO]
