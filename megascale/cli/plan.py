"""`megascale plan`: whether a run fits, how fast it will be and why, before a device is booked. It imports torch for
--exact only.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megascale.cli.main import add_config_arguments
from megascale.cli.numbers import count, counts, positive
from megascale.config.explain import load
from megascale.config.files import read
from megascale.config.resolved import to_toml
from megascale.config.run import RunConfig
from megascale.config.section import AUTO
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.core.files import write_text
from megascale.core.process import without_collection
from megascale.observe import timeline
from megascale.search import plot, report
from megascale.search.plan import Plan
from megascale.search.search import Found, search
from megascale.search.space import SUITED, VARIED
from megascale.search.timeline import events
from megascale.simulate import failures, profiles
from megascale.simulate.profiles import Hardware, Stack

WIDTH = 200
"""Columns of text where there is no terminal."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    add_config_arguments(sub)
    sub.add_argument("--gpus", type=count, metavar="N", help="devices of the job (default: as few as the layout needs)")
    names = f"one of {', '.join(profiles.names('hardware'))}, a FILE.toml, or this: what bench profile measured here"
    sub.add_argument("--hardware", metavar="NAME", required=True, help=names)
    names = f"one of {', '.join(profiles.names('stacks'))}, or a FILE.toml (default: megascale)"
    sub.add_argument("--stack", metavar="NAME", default="megascale", help=names)
    exact = "dry-run the fullest stages: exact memory, FLOPs and messages"
    sub.add_argument("--exact", action="store_true", help=exact)
    what = "find the fastest layouts for --gpus; keys set on the command line stay as they are"
    sub.add_argument("--search", action="store_true", help=what)
    sub.add_argument(
        "--output", metavar="FILE.toml", type=Path, help="with --search: write the fastest as a configuration"
    )
    sub.add_argument("--tokens", type=positive, metavar="T", help="how long T tokens take, such as 300e9")
    for name, metavar, value, what in (
        ("--mtbf", "H", failures.DEVICE_HOURS, "mean hours between failures of one device"),
        ("--save-s", "S", failures.SAVE_S, "seconds that training stands still for a checkpoint"),
        ("--restart-s", "S", failures.RESTART_S, "seconds from a failure to the next step"),
    ):
        sub.add_argument(name, type=positive, metavar=metavar, default=value, help=f"{what} (default: {value:g})")
    sub.add_argument("--sweep", metavar="N,N,...", type=counts, default=[], help="these numbers of devices too")
    sub.add_argument("--timeline", metavar="FILE.json", type=Path, help="write a timeline of the step, for Perfetto")
    sub.add_argument("--plot", metavar="FILE.png", type=Path, help="draw memory by stage, time by cause, and the sweep")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub.set_defaults(refuse=sub.error)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status: CONFIG for a run that does not fit."""
    with contextlib.nullcontext() if options.exact else without_collection():  # a plan's tuples are in no cycle
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    if options.output and not options.search:
        options.refuse("--output writes what --search finds")
    if options.search and options.sweep:
        options.refuse("--sweep plans for the layout of CONFIG: without --search")
    if options.search and not options.gpus:
        options.refuse("--search needs --gpus")
    for path in (options.output, options.timeline, options.plot):
        _make_room(path)
    if options.plot and options.plot.suffix != ".png":
        raise ConfigError([Problem("command line", f"--plot {options.plot}", "a PNG is drawn", "end it in .png")])
    swept = _swept(options)
    hardware = profiles.hardware(options.hardware)
    stack = profiles.stack_on(hardware, options.stack)
    _check_own(options, stack)
    found = _search(options, hardware, stack) if options.search else None
    if found and not found.best:
        return _nothing_found(options, found)
    planned = found.best[0] if found else Plan(_config(options, options.gpus), hardware, stack)
    if options.exact:
        planned = replace(planned, exact=_exact(planned.config, planned.memory_by_stage))
    sweep = [Plan(config, hardware, stack) for config in swept]
    instead = None if planned.fits else _instead(options, planned)
    _write(options, planned, sweep)
    _print(options, planned, sweep, found, instead)
    if instead is None:
        return Exit.OK
    print(f"{report.too_large(planned)}; {instead}", file=sys.stderr)
    return Exit.CONFIG


def _search(options: argparse.Namespace, hardware: Hardware, stack: Stack) -> Found:
    """Find the fastest layouts; keys that the command line sets stay as they are. The layout of CONFIG may be illegal,
    for the search replaces it.
    """
    return search(_config(options, None, layout=False), options.gpus, hardware, stack, _fixed(options))


def _nothing_found(options: argparse.Namespace, found: Found) -> int:
    """Say why no layout fits, with the plan of the smallest.

    Raises: ConfigError where none is legal since CONFIG has a mistake
    """
    if found.counts["legal"] == 0:
        _config(options, None)
    hint, smallest = _advice(options, found), found.smallest
    if options.json:
        least = report.plan_json(smallest, [], options.tokens, _lost(options, smallest)) if smallest else {}
        print(json.dumps({**least, "fits": False, "instead": hint, "search": report.search_json(found)}))
    print(hint, file=sys.stderr)
    return Exit.CONFIG


def _instead(options: argparse.Namespace, plan: Plan) -> str:
    """Say what would fit in place of a plan that does not."""
    config = plan.config
    return _advice(options, search(config, config.world, plan.hardware, plan.stack, _fixed(options), results=1))


def _advice(options: argparse.Namespace, found: Found) -> str:
    given = read(options.config, options.overrides).tree.get("parallel", {}).get("dp", AUTO)
    count = "parallel.dp" if given != AUTO else None if options.gpus else "--gpus"
    return report.advice(found, _fixed(options), count)


def _check_own(options: argparse.Namespace, stack: Stack) -> None:
    """Raises: ConfigError for what is this trainer's alone, with a stack that does other things."""
    for name, asked, mend in (
        ("--exact", options.exact, "plan without it: formulas know both"),
        ("--output", options.output, "write what is found with a stack that does not"),
    ):
        if asked and stack.shards_weights:
            own = f"{stack.name} shards weights, which this trainer does not"
            raise ConfigError([Problem("command line", name, own, mend)])


def _make_room(path: Path | None) -> None:
    """The folder of a file that will be written, before anything is computed.

    Raises: ConfigError if it cannot be made or written to, or the file is none
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise PermissionError(errno.EACCES, "is a folder" if path.is_dir() else "is no file")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "its folder is read-only")
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    found = f"cannot be written: {error.strerror}"
    return ConfigError([Problem("command line", str(path), found, "give another file")])


def _config(options: argparse.Namespace, gpus: int | None, *, layout: bool = True) -> RunConfig:
    """Load CONFIG for so many devices. Data need not be there yet; `layout`: whether its own layout must be legal."""
    unchecked = ["data"] if layout else ["data", "parallel"]
    return load(options.config, options.overrides, world=gpus, unchecked=unchecked)


def _swept(options: argparse.Namespace) -> list[RunConfig]:
    """For each number of devices of --sweep, fewest first.

    Raises: ConfigError that says for which there is none
    """
    found, problems = [], list[Problem]()
    for gpus in sorted(set(options.sweep)):
        try:
            found.append(_config(options, gpus))
        except ConfigError as error:
            problems += [replace(each, where=f"--sweep {gpus}: {each.where}") for each in error.problems]
    if problems:
        raise ConfigError(problems)
    return found


def _fixed(options: argparse.Namespace) -> list[str]:
    """List the keys of a layout that the command line sets."""
    settings = dict(text.replace(" ", "").split("=", 1) for text in options.overrides)
    return [key for key in (*VARIED, *SUITED) if settings.get(key, AUTO).strip("\"'") != AUTO]


def _exact(config: RunConfig, expected: list[int]) -> dict[str, Any]:
    from megascale.dryrun.exact import exact  # the only part that needs torch

    return exact(config, expected)


def _write(options: argparse.Namespace, plan: Plan, sweep: list[Plan]) -> None:
    """The files that were asked for.

    Raises: ConfigError for one that cannot be written
    """
    writers: list[tuple[Path | None, Callable[[Path], object]]] = [
        (options.timeline, lambda path: timeline.write(path, (timeline.part(rank, 0.0) for rank in events(plan)))),
        (options.plot, lambda path: plot.draw(path, plan, sweep)),
        (options.output, lambda path: write_text(path, to_toml(plan.config))),
    ]
    for path, write in writers:
        if path:
            try:
                write(path)
            except OSError as error:
                raise _unwritable(path, error) from None


def _print(
    options: argparse.Namespace, plan: Plan, sweep: list[Plan], found: Found | None, instead: str | None
) -> None:
    lost = _lost(options, plan)
    if options.json:
        more: dict[str, Any] = {"search": report.search_json(found)} if found else {}
        more |= {"instead": instead} if instead else {}
        print(json.dumps({**report.plan_json(plan, sweep, options.tokens, lost), **more}))
        return
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    for part in report.search_tables(found) if found else ():
        console.print(part)
    for part in report.tables(plan, sweep, options.tokens, lost):
        console.print(part)


def _lost(options: argparse.Namespace, plan: Plan) -> failures.Losses:
    return failures.losses(plan.config.world, options.mtbf, options.save_s, options.restart_s)
