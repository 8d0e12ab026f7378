"""Flags of other systems on a command line with settings: each is answered with the setting to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megascale.cli.command_table import elsewhere
from megascale.cli.parsing import CommandParser
from megascale.core.errors import Problem

NO_OPTION = "there is no such option"
NOT_OURS = "settings have no dashes: write section.key=value"


def flag_problems(
    command: str, words: Sequence[str], unknown: Sequence[str], parser: CommandParser
) -> Iterator[Problem]:  # fmt: skip
    """Yield a problem for each flag of the command line `words` that is `unknown`, with what the command takes in its
    place, or the setting that it means here or in Megatron-LM and others, and for each unknown word that no flag takes.
    `parser`: of the command.
    """
    from megascale.config.foreign.translation import is_ours, plain, read_flags, translate_all
    from megascale.config.loading import keys_named

    names = {word.partition("=")[0] for word in unknown if word.startswith("-")}
    flags = {flag: values for flag, values in read_flags(words).items() if flag in names}
    for flag, found in translate_all(flags):
        values = flags[flag]
        text = " ".join([flag, *map(str, values)])
        name, keys = flag.lstrip("-"), keys_named(plain(flag))
        if instead := elsewhere(command, flag):
            yield Problem("command line", text, NO_OPTION, instead)
        elif is_ours(name):
            yield Problem("command line", text, "a setting has no dashes", _write(name, values))
        elif keys and (found is None or found.key not in keys):
            yield Problem("command line", text, NO_OPTION, _write(keys[0], values))
        elif found is not None:
            message = f"{found.system} has this option"
            yield Problem("command line", text, message, found.hint(command_line=True))
        else:
            yield Problem("command line", text, NO_OPTION, parser.closest_option(flag) or NOT_OURS)
    for word in read_flags(unknown).get("", ()):
        yield Problem("command line", word, "not a setting", "write section.key=value")


def _write(name: str, values: Sequence[object]) -> str:
    from megascale.config.foreign.translation import assignment

    return f"write {assignment(name, values[0])}" if values else f"write {name}=VALUE"
