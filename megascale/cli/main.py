"""The table of subcommands, and what becomes of errors."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

import megascale
from megascale.core.errors import Exit, MegascaleError

COMMANDS = {
    "check": "every mistake of a configuration at once; nothing is launched",
    "plan": "whether a run fits, how fast it will be and why, before a device is booked",
    "train": "train, under torchrun or srun, or with processes of its own",
    "doctor": "what this machine has, which backend serves each operation and why, and tests of them",
    "bench": "measured numbers of this machine",
    "data": "make and look into token datasets",
    "ckpt": "look into checkpoints, check them, convert them",
    "sample": "text from a checkpoint, to see what was learnt",
    "trace": "the merged timeline of a run's ranks, for Perfetto",
}


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """The argument parser; only `command`, if given, is imported and has its arguments."""
    top = argparse.ArgumentParser(prog="megascale", description=megascale.__doc__)
    top.add_argument("--version", action="version", version=f"megascale {megascale.__version__}")
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_line in COMMANDS.items():
        sub = subparsers.add_parser(name, help=help_line, description=help_line[0].upper() + help_line[1:] + ".")
        if name == command:
            importlib.import_module(f"megascale.cli.{name}").add_arguments(sub)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status (see `megascale.core.errors.Exit`)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C just ends the process until a command takes it over: imports swallow exceptions, or end in a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = next((word for word in given if not word.startswith("-")), None)
    try:
        options = _parse(parser(command), given)
        return int(importlib.import_module(f"megascale.cli.{options.command}").run(options))
    except MegascaleError as error:
        print(error, file=sys.stderr)
        return int(error.exit_status)
    except BrokenPipeError:  # the reader of our output went away: nothing is wrong
        sys.stderr.close()
        return int(Exit.UNCLASSIFIED)


def _parse(top: argparse.ArgumentParser, given: Sequence[str]) -> argparse.Namespace:
    """Parse; settings may also stand after options, where argparse does not look for them."""
    options, rest = top.parse_known_args(given)
    if "overrides" in options and not any(word.startswith("-") for word in rest):
        options.overrides += rest
    elif rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def add_config_arguments(sub: argparse.ArgumentParser) -> None:
    """The arguments of every subcommand that reads a run's configuration."""
    sub.add_argument("config", metavar="CONFIG", help="a TOML file")
    sub.add_argument(
        "overrides", metavar="key=value", nargs="*", help="settings that win over the file, as section.key=value"
    )
