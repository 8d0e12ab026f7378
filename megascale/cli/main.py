"""Entry point of the `megascale` command: parsing, and errors as exit statuses."""

from __future__ import annotations

import argparse
import gc
import importlib
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import megascale
from megascale.cli.command_table import (
    COMMANDS,
    COMMANDS_ELSEWHERE,
    FAMILIES,
    GROUPS,
    HIDDEN_COMMANDS,
    command_of,
    commands_below,
    elsewhere,
    gone_command,
)
from megascale.cli.foreign_flags import flag_problems
from megascale.cli.parsing import CommandParser
from megascale.cli.standard_streams import (
    discard_unwritable_output,
    escape_output,
    name_files_in_utf8,
    open_closed_streams,
)
from megascale.cli.torch_import import torch_import_problem
from megascale.core.errors import ConfigError, Exit, MegascaleError, Problem
from megascale.core.registry import closest_name

STARTS_RANKS = ("train", "launch")


def command_parser(command: str) -> CommandParser:
    """Build the parser of a command, "" for `megascale` itself. Only the command's own module is imported."""
    prog = f"megascale {command}".rstrip()
    if command in HIDDEN_COMMANDS:
        parser = CommandParser(prog, "Started by other commands.")
    elif command:
        one = COMMANDS[command]
        about = f"{one.help[0].upper()}{one.help[1:]}."
        parser = CommandParser(prog, about, f"megascale {one.example}", one.page)
    else:
        about = f"{megascale.__doc__}\n\n`megascale COMMAND --help` describes a command."
        parser = CommandParser(prog, about, f"megascale {COMMANDS['check'].example}", "docs/first-hour.md")
        parser.add_argument("--version", action="version", version=f"megascale {megascale.__version__}")
        for heading, names in GROUPS.items():
            _list_commands(parser, heading, names)
    if command and command not in FAMILIES:
        _functions(command)[0](parser)
    else:
        parser.usage = f"{prog} COMMAND ..."
    if command and (below := commands_below(command)):
        same = "" if command in FAMILIES else f" (a CONFIG of such a name is ./{below[0].split()[1]})"
        _list_commands(parser, f"commands{same}", below)
    if parser.usage:
        parser._action_groups.sort(key=lambda group: group is parser._optionals)  # the commands first
    return parser


def _list_commands(parser: argparse.ArgumentParser, heading: str, names: Sequence[str]) -> None:
    """Add a section of commands to the parser's help, which the parser does not parse."""
    group = parser.add_argument_group(heading)
    group._group_actions += [argparse.Action((), name, help=COMMANDS[name].help) for name in names]


def _functions(command: str) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    """Import a command's module, and return the functions that declare its arguments and run it."""
    shared = COMMANDS[command].module if command in COMMANDS else ""
    module = importlib.import_module(f"megascale.cli.{shared or re.sub('[ -]', '_', command)}")
    return module.VERBS[command.split()[1]] if shared else (module.add_arguments, module.run)


def parse(words: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """Return the command of a command line, and its options. key=value settings and a query may stand after options
    too, which argparse alone would refuse.

    Raises: SystemExit for help, and with status 2 for a command line that is wrong; ConfigError for options of other
    tools and flags in the place of settings
    """
    if gone := gone_command(words):
        old, new = gone
        hint = f"see megascale {command_of(new.split())} --help"
        CommandParser("megascale", "").error(f"`megascale {old}` is now `megascale {new}`  -> {hint}")
    command = command_of(words)
    parser = command_parser(command)
    unknown = [
        word for word in words if word.startswith("--") and word.partition("=")[0] not in parser._option_string_actions
    ]
    if any(elsewhere(command, word) for word in unknown):
        raise ConfigError(list(flag_problems(command, words, unknown, parser)))
    options, rest = parser.parse_known_args(words[len(command.split()) :])
    if not command or command in FAMILIES:
        _refuse_command(parser, command, rest)
    if "overrides" in options and any(word.startswith("-") for word in rest):
        raise ConfigError(list(flag_problems(command, words, rest, parser)))
    if "overrides" in options:
        options.overrides = [*options.overrides, *rest]
    elif len(rest) == 1 and not rest[0].startswith("-") and getattr(options, "query", "") is None:
        options.query = rest[0]
    elif rest:
        hint = parser.closest_option(rest[0])
        parser.error(f"unrecognized arguments: {' '.join(rest)}" + (f"  -> {hint}" if hint else ""))
    return command, options


def _refuse_command(parser: CommandParser, family: str, words: Sequence[str]) -> NoReturn:
    """End for a command line without a command, or with one that does not exist."""
    known = [name.removeprefix(f"{family} ") for name in (commands_below(family) if family else COMMANDS)]
    known = [name for name in known if " " not in name]
    if not words:
        parser.error(f"a command is missing  -> one of {', '.join(known)}")
    close = closest_name(words[0], known)
    hint = f"did you mean '{close}'?" if close else f"one of {', '.join(known)}"
    hint = COMMANDS_ELSEWHERE.get(words[0], hint)
    parser.error(f"there is no command '{words[0]}'  -> {hint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (see `megascale.core.errors.Exit`)."""
    if arguments is None:
        open_closed_streams()
        name_files_in_utf8()
    escape_output()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # imports may swallow KeyboardInterrupt or print a traceback: Ctrl-C ends the process until a command handles it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        command, options = parse(words)
        _check_current_folder()
        return int(_functions(command)[1](options))
    except MegascaleError as error:
        launched = isinstance(error, ConfigError) and command_of(words) in STARTS_RANKS
        print(f"{error}{'; nothing was launched' if launched else ''}", file=sys.stderr)
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
    finally:
        if arguments is None:
            gc.freeze()  # the process ends: its last collection would scan all of torch


def _check_current_folder() -> None:
    """Check that the current folder is there: without it torch's libraries end the process as they are loaded.

    Raises: ConfigError
    """
    try:
        Path.cwd()
    except OSError as error:
        what = f"the current folder cannot be used: {error.strerror}"
        raise ConfigError([Problem("environment", "", what, "cd to another folder")]) from None
