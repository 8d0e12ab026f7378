"""The options of `megascale plan`, and which of them contradict each other."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path

from megascale.cli.arguments import add_config_arguments, add_json, positive_float, positive_int, positive_ints
from megascale.cli.plan_output import writing
from megascale.config.profile_files import profile_names
from megascale.core.errors import ConfigError, Problem
from megascale.core.files import exists, is_file, is_folder
from megascale.plan.simulate import failures, profiles
from megascale.plan.simulate.profiles import Hardware, Stack

LEAVE_OUT_EXACT = "leave it out: the formulas cover both"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(sub)
    add_machine_options(sub)
    exact = "dry-run the stages with the highest peak memory: exact memory, FLOPs and communication"
    sub.add_argument("--exact", action="store_true", help=exact)
    search_help = "search the fastest layouts for --gpus; keys set on the command line stay fixed"
    sub.add_argument("--search", action="store_true", help=search_help)
    output = "with --search: write the fastest layout's configuration"
    sub.add_argument("--output", metavar="FILE.toml", type=Path, help=output)
    sub.add_argument("--tokens", type=positive_float, metavar="T", help="estimate the days for T tokens, such as 300e9")
    for name, metavar, value, meaning in (
        ("--mtbf", "H", failures.DEVICE_HOURS, "mean hours between failures of one device"),
        ("--save-s", "S", failures.SAVE_S, "seconds that training pauses for a checkpoint"),
        ("--restart-s", "S", failures.RESTART_S, "seconds from a failure to the next step"),
    ):
        text = f"{meaning} (default: {value:g})"
        sub.add_argument(name, type=positive_float, metavar=metavar, default=value, help=text)
    sweep = "also plan for these numbers of devices"
    sub.add_argument("--sweep", metavar="N,N,...", type=positive_ints, default=[], help=sweep)
    sub.add_argument("--timeline", metavar="FILE.json", type=Path, help="write a timeline of the step for Perfetto")
    sub.add_argument("--plot", metavar="FILE.png", type=Path, help="plot memory by stage, time by cause, and the sweep")
    add_json(sub)


def add_machine_options(sub: argparse.ArgumentParser) -> None:
    """Declare --gpus, --hardware and --stack."""
    gpus = "number of devices (default: the fewest that the layout needs)"
    sub.add_argument("--gpus", type=positive_int, metavar="N", help=gpus)
    names = f"required: one of {', '.join(profile_names('hardware'))}, a FILE.toml, or this, which bench profile writes"
    sub.add_argument("--hardware", metavar="NAME", help=names)
    names = f"one of {', '.join(profile_names('stacks'))}, or a FILE.toml (default: megascale)"
    sub.add_argument("--stack", metavar="NAME", default="megascale", help=names)
    sub.set_defaults(refuse=sub.error)


def machine_of(options: argparse.Namespace) -> tuple[Hardware, Stack]:
    """Load the profiles of --hardware and --stack. Raises: ConfigError"""
    if options.hardware is None:
        options.refuse(f"--hardware is missing  -> one of {', '.join(profile_names('hardware'))}, a FILE.toml, or this")
    hardware = profiles.hardware(options.hardware)
    return hardware, profiles.stack_on(hardware, options.stack)


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, and files that cannot be written. Raises: ConfigError"""
    if options.output and not options.search:
        options.refuse("--output needs --search")
    if options.search and options.sweep:
        options.refuse("--sweep plans the layout of CONFIG: leave out --search")
    if options.search and not options.gpus:
        options.refuse("--search needs --gpus")
    for path in filter(None, (options.output, options.timeline, options.plot)):
        with writing(path):  # before anything is computed
            path.parent.mkdir(parents=True, exist_ok=True)
            if exists(path) and not is_file(path):
                raise PermissionError(errno.EACCES, "is a folder" if is_folder(path) else "is not a regular file")
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, "its folder is read-only")
    if options.plot and options.plot.suffix != ".png":
        name = f"--plot {options.plot}"
        raise ConfigError([Problem("command line", name, "the plot is a PNG", "give a name that ends in .png")])


def failure_cost(options: argparse.Namespace, devices: int) -> failures.FailureCost:
    """Return what failures of a job on `devices` devices cost."""
    return failures.failure_cost(devices, options.mtbf, options.save_s, options.restart_s)
