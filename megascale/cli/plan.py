"""`megascale plan`: estimates of memory, step time and MFU, and search for layouts. Only --exact imports torch."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megascale.cli.argument_types import positive_float, positive_int, positive_ints
from megascale.cli.main import add_config_arguments
from megascale.cli.plan_lengths import add_length_arguments, refused_with_lengths
from megascale.cli.plan_lengths import report as report_lengths
from megascale.config.loading import load_config
from megascale.config.profile_files import profile_names
from megascale.config.run import RunConfig
from megascale.config.section import AUTO
from megascale.config.toml_reader import read_toml
from megascale.config.toml_writer import to_toml
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.core.files import exists, is_file, is_folder, write_text
from megascale.core.process import without_gc
from megascale.operate.show import chrome_trace
from megascale.plan.search import plot, report
from megascale.plan.search.plan import Plan
from megascale.plan.search.search import SearchResult, search
from megascale.plan.search.space import DEPENDENT_KEYS, LAYOUT_KEYS
from megascale.plan.search.timeline import events
from megascale.plan.simulate import failures, profiles
from megascale.plan.simulate.profiles import Hardware, Stack

WIDTH = 200
"""Width of the tables in columns if stdout is not a terminal."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_config_arguments(sub)
    sub.add_argument(
        "--gpus", type=positive_int, metavar="N", help="number of devices (default: the fewest that the layout needs)"
    )
    names = f"one of {', '.join(profile_names('hardware'))}, a FILE.toml, or this (the profile of bench profile)"
    sub.add_argument("--hardware", metavar="NAME", required=True, help=names)
    names = f"one of {', '.join(profile_names('stacks'))}, or a FILE.toml (default: megascale)"
    sub.add_argument("--stack", metavar="NAME", default="megascale", help=names)
    exact = "dry-run the stages with the highest peak memory: exact memory, FLOPs and communication"
    sub.add_argument("--exact", action="store_true", help=exact)
    search_help = "search the fastest layouts for --gpus; keys set on the command line stay fixed"
    sub.add_argument("--search", action="store_true", help=search_help)
    sub.add_argument(
        "--output", metavar="FILE.toml", type=Path, help="with --search: write the fastest layout's configuration"
    )
    sub.add_argument("--tokens", type=positive_float, metavar="T", help="estimate the days for T tokens, such as 300e9")
    for name, metavar, value, meaning in (
        ("--mtbf", "H", failures.DEVICE_HOURS, "mean hours between failures of one device"),
        ("--save-s", "S", failures.SAVE_S, "seconds that training pauses for a checkpoint"),
        ("--restart-s", "S", failures.RESTART_S, "seconds from a failure to the next step"),
    ):
        sub.add_argument(
            name, type=positive_float, metavar=metavar, default=value, help=f"{meaning} (default: {value:g})"
        )
    sub.add_argument(
        "--sweep", metavar="N,N,...", type=positive_ints, default=[], help="also plan for these numbers of devices"
    )
    add_length_arguments(sub)
    sub.add_argument("--timeline", metavar="FILE.json", type=Path, help="write a timeline of the step for Perfetto")
    sub.add_argument("--plot", metavar="FILE.png", type=Path, help="plot memory by stage, time by cause, and the sweep")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub.set_defaults(refuse=sub.error)
    sub.epilog = "`megascale plan batch CONFIG` plans the global batch."


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status: `Exit.CONFIG` for a run that does not fit in memory."""
    # a plan allocates many tuples, none in a cycle
    with contextlib.nullcontext() if options.exact else without_gc():
        return _run(options)


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, and files that cannot be written.

    Raises: ConfigError
    """
    if options.output and not options.search:
        options.refuse("--output needs --search")
    if options.search and options.sweep:
        options.refuse("--sweep plans the layout of CONFIG: leave out --search")
    if options.search and not options.gpus:
        options.refuse("--search needs --gpus")
    if refused := refused_with_lengths(options):
        options.refuse(refused)
    for path in (options.output, options.timeline, options.plot):
        _check_writable(path)
    if options.plot and options.plot.suffix != ".png":
        raise ConfigError(
            [Problem("command line", f"--plot {options.plot}", "the plot is a PNG", "give a name that ends in .png")]
        )


def _run(options: argparse.Namespace) -> int:
    _check_options(options)
    swept = _sweep_configs(options)
    hardware = profiles.hardware(options.hardware)
    stack = profiles.stack_on(hardware, options.stack)
    _check_stack(options, stack)
    if options.lengths:
        print_tables(report_lengths(options, _config(options, options.gpus), hardware, stack))
        return Exit.OK
    search_result = _search(options, hardware, stack) if options.search else None
    if search_result and not search_result.best:
        return _report_no_fit(options, search_result)
    planned = search_result.best[0] if search_result else Plan(_config(options, options.gpus), hardware, stack)
    if options.exact:
        from megascale.plan.dryrun.exact_costs import exact_costs  # imports torch

        _check_fp8_weights(planned)
        planned = replace(planned, exact=exact_costs(planned.config, planned.memory_by_stage))
    sweep = [Plan(config, hardware, stack) for config in swept]
    alternative = None if planned.fits else _suggest_alternative(options, planned)
    _write(options, planned, sweep)
    _print(options, planned, sweep, search_result, alternative)
    if alternative is None:
        return Exit.OK
    print(f"{report.too_large_message(planned)}; {alternative}", file=sys.stderr)
    return Exit.CONFIG


def _search(options: argparse.Namespace, hardware: Hardware, stack: Stack) -> SearchResult:
    """Find the fastest layouts. Keys set on the command line stay fixed; the layout of CONFIG need not be legal.

    Raises: ConfigError for a configuration whose layouts have no time
    """
    config = _config(options, None, layout=False)
    if config.parallel.cp_mode == "hybrid":
        what = "the time of hybrid depends on the lengths of documents, and --search plans with one length"
        raise ConfigError([Problem(options.config, "parallel.cp_mode", what, "plan with --lengths, which names both")])
    return search(config, options.gpus, hardware, stack, _fixed_keys(options))


def _report_no_fit(options: argparse.Namespace, search_result: SearchResult) -> int:
    """Print why no layout fits, with the plan of the layout that needs the least memory.

    Raises: ConfigError if no layout is legal because CONFIG has a mistake
    """
    if search_result.counts["legal"] == 0:
        _config(options, None)
    hint, smallest = _advice(options, search_result), search_result.smallest
    if options.json:
        plan = report.plan_json(smallest, [], options.tokens, _failure_cost(options, smallest)) if smallest else {}
        print(json.dumps({**plan, "fits": False, "suggestion": hint, "search": report.search_json(search_result)}))
    print(hint, file=sys.stderr)
    return Exit.CONFIG


def _suggest_alternative(options: argparse.Namespace, plan: Plan) -> str:
    """Describe a layout that fits, in place of a plan that does not fit."""
    config = plan.config
    return _advice(
        options, search(config, config.world_size, plan.hardware, plan.stack, _fixed_keys(options), results=1)
    )


def _advice(options: argparse.Namespace, search_result: SearchResult) -> str:
    dp_setting = read_toml(options.config, options.overrides).tree.get("parallel", {}).get("dp", AUTO)
    count = "parallel.dp" if dp_setting != AUTO else None if options.gpus else "--gpus"
    return report.advice(search_result, _fixed_keys(options), count)


def _check_stack(options: argparse.Namespace, stack: Stack) -> None:
    """Raises: ConfigError for an option that only this trainer supports, with a stack that shards weights."""
    for name, asked, hint in (
        ("--exact", options.exact, "leave it out: the formulas cover both"),
        ("--output", options.output, "search with a stack that does not shard weights"),
    ):
        if asked and stack.shards_weights:
            message = f"{stack.name} shards weights, which this trainer does not"
            raise ConfigError([Problem("command line", name, message, hint)])


def _check_fp8_weights(plan: Plan) -> None:
    """Raises: ConfigError for a dry run of a stack that has FP8 weights in place of bf16 ones."""
    if plan.config.train.quantizes and plan.stack.fp8_weights == "instead":
        message = f"{plan.stack.name} stores FP8 weights instead of bf16 ones, this trainer stores both"
        raise ConfigError([Problem("command line", "--exact", message, "leave it out: the formulas cover both")])


def _check_writable(path: Path | None) -> None:
    """Make the folder of an output file and check that the file can be written, before anything is computed.

    Raises: ConfigError if the folder cannot be made or written to, or the path is no regular file
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if exists(path) and not is_file(path):
            raise PermissionError(errno.EACCES, "is a folder" if is_folder(path) else "is not a regular file")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "its folder is read-only")
    except OSError as error:
        raise _unwritable_error(path, error) from None


def _unwritable_error(path: Path, error: OSError) -> ConfigError:
    message = f"cannot be written: {error.strerror}"
    return ConfigError([Problem("command line", str(path), message, "give another file")])


def _config(options: argparse.Namespace, gpus: int | None, *, layout: bool = True) -> RunConfig:
    """Load CONFIG for `gpus` devices, without a check of its data; without `layout`, of its parallelism either."""
    unchecked = ["data"] if layout else ["data", "parallel"]
    return load_config(options.config, options.overrides, world_size=gpus, skip_sections=unchecked)


def _sweep_configs(options: argparse.Namespace) -> list[RunConfig]:
    """Load a configuration for each number of devices of --sweep, in ascending order.

    Raises: ConfigError with the mistakes for every number of devices
    """
    configs, problems = [], list[Problem]()
    for gpus in sorted(set(options.sweep)):
        try:
            configs.append(_config(options, gpus))
        except ConfigError as error:
            problems += [replace(problem, where=f"--sweep {gpus}: {problem.where}") for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return configs


def _fixed_keys(options: argparse.Namespace) -> list[str]:
    """List the layout's keys that the command line sets."""
    settings = dict(text.replace(" ", "").split("=", 1) for text in options.overrides)
    return [key for key in (*LAYOUT_KEYS, *DEPENDENT_KEYS) if settings.get(key, AUTO).strip("\"'") != AUTO]


def _write(options: argparse.Namespace, plan: Plan, sweep: list[Plan]) -> None:
    """Write the files of --timeline, --plot and --output.

    Raises: ConfigError for a file that cannot be written
    """
    writers: list[tuple[Path | None, Callable[[Path], object]]] = [
        (
            options.timeline,
            lambda path: chrome_trace.write_trace(path, events(plan), 0.0),
        ),
        (options.plot, lambda path: plot.draw(path, plan, sweep)),
        (options.output, lambda path: write_text(path, to_toml(plan.config))),
    ]
    for path, write in writers:
        if path:
            try:
                write(path)
            except OSError as error:
                raise _unwritable_error(path, error) from None


def _print(
    options: argparse.Namespace,
    plan: Plan,
    sweep: list[Plan],
    search_result: SearchResult | None,
    alternative: str | None,
) -> None:
    cost = _failure_cost(options, plan)
    if options.json:
        extra: dict[str, Any] = {"search": report.search_json(search_result)} if search_result else {}
        extra |= {"suggestion": alternative} if alternative else {}
        print(json.dumps({**report.plan_json(plan, sweep, options.tokens, cost), **extra}))
        return
    print_tables(report.search_tables(search_result) if search_result else ())
    print_tables(report.tables(plan, sweep, options.tokens, cost))


def print_tables(parts: Iterable[str | Table]) -> None:
    """Print lines and tables, to the width of a terminal."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    for part in parts:
        console.print(part, markup=False)


def _failure_cost(options: argparse.Namespace, plan: Plan) -> failures.FailureCost:
    return failures.failure_cost(plan.config.world_size, options.mtbf, options.save_s, options.restart_s)
