"""Flags of other systems on a command line with settings: each is answered with the setting to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megascale.core.errors import Problem

NOT_OURS = "settings have no dashes: write section.key=value"


def flag_problems(words: Sequence[str], unknown: Sequence[str], known: Sequence[str] = ()) -> Iterator[Problem]:
    """Yield a problem for each flag of the command line `words` that is `unknown`, with the setting that a flag of
    Megatron-LM and others means, and for each unknown word that no flag takes. `known`: the command's own options.
    """
    from megascale.config.foreign.translation import is_ours, read_flags, translate_all
    from megascale.core.registry import closest_name

    names = {word.partition("=")[0] for word in unknown if word.startswith("-")}
    flags = {flag: values for flag, values in read_flags(words).items() if flag in names}
    for flag, found in translate_all(flags):
        values = flags[flag]
        text = " ".join([flag, *map(str, values)])
        name = flag.lstrip("-")
        if is_ours(name):
            yield Problem("command line", text, "a setting has no dashes", _write(name, values))
        elif found is not None:
            message = f"{found.system} has this option"
            yield Problem("command line", text, message, found.hint(command_line=True))
        else:
            close = closest_name(flag, known)
            hint = f"did you mean '{close}'?" if close else NOT_OURS
            yield Problem("command line", text, "there is no such option", hint)
    for word in read_flags(unknown).get("", ()):
        yield Problem("command line", word, "not a setting", "write section.key=value")


def _write(name: str, values: Sequence[object]) -> str:
    from megascale.config.foreign.translation import assignment

    return f"write {assignment(name, values[0])}" if values else f"write {name}=VALUE"
