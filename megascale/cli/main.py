"""Entry point of the `megascale` command: the table of subcommands, parsing, and errors as exit statuses."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import megascale
from megascale.cli.arguments import sentence
from megascale.cli.foreign_flags import flag_problems
from megascale.cli.standard_streams import (
    discard_unwritable_output,
    escape_output,
    name_files_in_utf8,
    open_closed_streams,
)
from megascale.cli.torch_import import torch_import_problem
from megascale.core.errors import ConfigError, Exit, MegascaleError, Problem
from megascale.core.registry import closest_name

COMMANDS = {
    "check": "find every mistake of a configuration, without launching anything",
    "plan": "estimate memory, step time and MFU of a run before a device is booked",
    "train": "train as a rank of torchrun or srun, or launch the ranks on this host",
    "launch": "train with a driver, agents and spare nodes: a job that survives faults",
    "observe": "watch a job of torchrun or srun, with one process on each host: who hangs, who failed first",
    "watch": "show the live state of every rank of a run in the terminal",
    "diagnose": "say whether a run hangs, which rank the others wait for, and why",
    "dashboard": "show runs as a web page: curves, heat map, timeline, every rank",
    "report": "write what is known about a run as one HTML file",
    "doctor": "describe this machine and the backend of each operation, and test the backends",
    "bench": "measure GEMMs, links, training steps and overlap on this machine",
    "data": "prepare and inspect token datasets",
    "ckpt": "list, show, verify, compare and convert checkpoints",
    "sample": "generate text from a checkpoint",
    "mfu": "show where a run's time went, from the peak to the achieved MFU, and what grew since its start",
    "events": "query a run's event store: every event, step and state of every rank",
    "trace": "merge the event logs of a run's ranks into one timeline for Perfetto",
}

SECOND_COMMANDS = {"plan batch": "plan the global batch: the critical batch, a ramp-up, and what a batch costs"}
"""Commands of two words, which the help of the first names; `plan batch` is in `cli/plan_batch.py`."""

HIDDEN_COMMANDS = ("agent", "collect", "driver", "standby")  # commands that other commands start


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Build the argument parser. Only the subcommand `command` is imported and declares arguments."""
    top = argparse.ArgumentParser(prog="megascale", description=megascale.__doc__)
    top.add_argument("--version", action="version", version=f"megascale {megascale.__version__}")
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_line in COMMANDS.items():
        sub = subparsers.add_parser(name, help=help_line, description=sentence(help_line))
        if name == command:
            command_module(name).add_arguments(sub)
    if command in SECOND_COMMANDS:
        help_line = SECOND_COMMANDS[command]
        sub = subparsers.add_parser(command, description=sentence(help_line))
        command_module(command).add_arguments(sub)
    if command in HIDDEN_COMMANDS:
        command_module(command).add_arguments(subparsers.add_parser(command))
    return top


def command_module(command: str) -> ModuleType:
    """Import the module of a subcommand."""
    return importlib.import_module(f"megascale.cli.{command.replace(' ', '_')}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status (see `megascale.core.errors.Exit`)."""
    if arguments is None:
        open_closed_streams()
        name_files_in_utf8()
    escape_output()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if (two_words := " ".join(words[:2])) in SECOND_COMMANDS:
        words[:2] = [two_words]
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # imports may swallow KeyboardInterrupt or print a traceback: Ctrl-C ends the process until a command handles it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = next((word for word in words if not word.startswith("-")), None)
    try:
        top = parser(command)
        if (
            command
            and command not in (*COMMANDS, *SECOND_COMMANDS, *HIDDEN_COMMANDS)
            and (close := closest_name(command, COMMANDS))
        ):
            top.error(f"there is no command '{command}'  -> did you mean '{close}'?")
        options = _parse(top, words)
        _check_current_folder()
        return int(command_module(options.command).run(options))
    except MegascaleError as error:
        print(error, file=sys.stderr)
        return int(error.exit_status)
    except BrokenPipeError:  # the reader of the output, such as head, has exited
        sys.stderr.close()
        return int(Exit.UNCLASSIFIED)
    except Exception as error:
        if (problem := torch_import_problem(error)) is not None:
            print(problem, file=sys.stderr)
            return int(problem.exit_status)
        if not (isinstance(error, OSError) and discard_unwritable_output()):
            raise
        print(f"megascale: the output cannot be written: {error.strerror}", file=sys.stderr)
        return int(Exit.UNCLASSIFIED)


def _check_current_folder() -> None:
    """Check that the current folder is there: without it torch's libraries end the process as they are loaded.

    Raises: ConfigError
    """
    try:
        Path.cwd()
    except OSError as error:
        what = f"the current folder cannot be used: {error.strerror}"
        raise ConfigError([Problem("environment", "", what, "cd to another folder")]) from None


def _parse(top: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse arguments. Accepts key=value settings and a query after options too, which argparse alone would refuse."""
    options, rest = top.parse_known_args(words)
    if "overrides" in options and any(word.startswith("-") for word in rest):
        raise ConfigError(list(flag_problems(words, rest)))
    if "overrides" in options:
        options.overrides = [*options.overrides, *rest]
    elif len(rest) == 1 and not rest[0].startswith("-") and getattr(options, "query", "") is None:
        options.query = rest[0]
    elif rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    return options
