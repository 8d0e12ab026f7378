"""`megascale import-config`: the arguments of a run of Megatron-LM or torchtitan as a configuration."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from megascale.cli.arguments import positive_int
from megascale.cli.command_output import OutputError, writing
from megascale.config.foreign.imported import UNKNOWN, Arguments, import_arguments, read_arguments
from megascale.config.foreign.setting import plain
from megascale.config.foreign.translation import OURS, SYSTEMS, find, is_ours, read_value
from megascale.core.errors import ConfigError, Exit, Problem
from megascale.core.files import exists, write_text
from megascale.core.registry import closest_name

CHECKPOINT = "megatron:"  # prefix of a folder of checkpoints


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    kinds = (
        "a script of pretrain_gpt.py, a file of its arguments, a YAML of them, or megatron:FOLDER, its checkpoint; "
        "torchtitan's TOML or torchtitan:NAME"
    )
    sub.add_argument("source", metavar="SCRIPT", help=kinds)
    words = "a word behind the script's name, $1 and on; or section.key=value, to add a setting"
    sub.add_argument("words", metavar="WORD", nargs="*", help=words)
    sub.add_argument("--output", metavar="FILE.toml", type=Path, help="file of the configuration (default: print it)")
    sub.add_argument("--gpus", type=positive_int, metavar="N", help="check for a job of N processes")
    removed = "arguments to leave out, separated by commas, such as fp16,decoupled-lr"
    sub.add_argument("--without", metavar="NAMES", default="", help=removed)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    added = dict(word.split("=", 1) for word in options.words if OURS.match(word))
    words = [word for word in options.words if not OURS.match(word)]
    if unknown := [key for key in added if not is_ours(key)]:
        raise ConfigError([Problem("command line", key, "no such key", "docs/configuration.md") for key in unknown])
    if options.output and exists(options.output):
        raise OutputError(f"{options.output} is there already", hint="give a new file")
    if options.source.startswith(CHECKPOINT):
        from megascale.convert.megatron_lm.namespace import stored_arguments  # imports torch

        arguments = stored_arguments(Path(options.source.removeprefix(CHECKPOINT)))
    else:
        arguments = read_arguments(options.source, words, os.environ)
    settings = {key: read_value(value) for key, value in added.items()}
    left_out = {plain(name) for name in filter(None, options.without.split(","))}
    if missing := left_out - {plain(name) for name in arguments.given}:
        raise ConfigError([Problem("command line", "--without", f"the source has no {min(missing)}")])
    given = {name: values for name, values in arguments.given.items() if plain(name) not in left_out}
    gpus = options.gpus or arguments.gpus
    made = import_arguments(arguments.system, given, gpus, arguments.unknown)
    keys = {name: found[1].key for name in made.refused if (found := find(name, arguments.system))}
    if refused := {name: why for name, why in made.refused.items() if keys.get(name) not in settings}:
        raise ConfigError([_refused(options.source, arguments, name, why) for name, why in refused.items()])
    made.defaults -= set(settings)
    made.settings |= settings
    name = re.sub(r"[^A-Za-z0-9._-]", "-", (options.output or Path(options.source)).stem).lstrip("._-") or "imported"
    made.check(name, options.source, gpus, arguments.system)
    text = made.to_toml(name)
    if options.output is None:
        print(text, end="")
    else:
        with writing(options.output):
            write_text(options.output, text)
    total, stored = len(made.mapped) + len(made.dropped), options.source.startswith(CHECKPOINT)
    counts = f"{total} arguments: {len(made.mapped)} mapped, {len(made.dropped)} dropped"
    report = [f"{counts}; {len(made.defaults)} other defaults of {arguments.system} written"]
    report += [f"converted {note}" for note in made.notes.values()]
    # a checkpoint has the defaults of other arguments, too
    report += [f"dropped {one}: {why}" for one, why in made.dropped.items() if not stored or given[one][0] is True]
    print("\n".join(report), file=sys.stderr if options.output is None else sys.stdout)
    return Exit.OK


def _refused(source: str, arguments: Arguments, name: str, why: str) -> Problem:
    """Return a refused argument as a problem, with its line, and with the name that is meant by an unknown one."""
    table, _, last = plain(name).rpartition(".")
    names = (one for row in SYSTEMS[arguments.system] for one in row.names)
    known = {plain(one).rpartition(".")[2]: one for one in sorted(names, key=lambda one: one.startswith(f"{table}."))}
    near = closest_name(last, known) if why == UNKNOWN else None
    hint = "remove it from the source, or by --without, or add its setting"
    line = arguments.line_of(name)
    where = f"{source}:{line}" if line else source
    return Problem(where, name, why, f"did you mean {known[near]}? If not, {hint}" if near else hint)
