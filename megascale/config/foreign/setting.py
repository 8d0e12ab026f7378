"""A setting of another system: the key here that means the same, the conversion of its value, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Values = Sequence[Any]
"""The values that are written for a setting: none for a switch of the command line, several for a list."""

Context = Mapping[str, Values]
"""All settings that are given together, by `plain` name."""

Conversion = Callable[[Values, Context], Any]
"""Returns the value here, or Advice. Raises: one of translation.FAILURES for a value without one."""

MANY = -1  # `Setting.takes` of a list

NO_FP16 = "fp16, which needs loss scaling, is not supported: bf16, of the same size, needs none"


class Advice(str):
    """Says what to write or do in place of the key, for a value that has none: without it a run differs."""


class Needless(Advice):
    """Says why there is nothing to write: the run is the same."""


class Several(dict[str, Any]):
    """The settings here that a value means together, by key."""


def plain(name: str) -> str:
    """Return a name in one spelling: --micro-batch-size is micro_batch_size."""
    return name.lstrip("-").replace("-", "_").lower()


@dataclass(frozen=True)
class Setting:
    """A setting of another system. `listed`: its `names`, separated by commas; `key`: the key here, empty if there is
    none. `note`: what differs, or what to write in its place. `theirs`: the key's value without it, where that differs
    from the default here. `takes`: number of values on a command line. `only_with`: the other setting that this needs.
    `meanings`: its words in lower case, with the values here. `notes`: by word, in place of `note`.
    """

    listed: str
    key: str
    convert: Conversion = lambda values, context: values[0]
    note: str = ""
    theirs: Any = None
    takes: int = 1
    only_with: str = ""
    meanings: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.listed.split(", "))


def as_word(value: Any = "") -> str:
    """Return a value as a key of `Setting.notes`."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value).lower()


def same(names: str, key: str, note: str = "", theirs: Any = None, only_with: str = "") -> Setting:
    """Make a setting with the same values."""
    return Setting(names, key, note=note, theirs=theirs, only_with=only_with)


def same_values(keys: Mapping[str, str]) -> list[Setting]:
    """Make settings with the same values, by names."""
    return [same(names, key) for names, key in keys.items()]


def switch(names: str, key: str, value: Any, note: str = "", theirs: Any = None) -> Setting:
    """Make a switch, which means `value` if it is on."""
    on = dict.fromkeys(("true", "1"), value)
    off = dict.fromkeys(("false", "0"), not value) if isinstance(value, bool) else {}
    return Setting(names, key, lambda values, _: (on | off)[as_word(*values)] if values else value, note, theirs, 0)


def words(
    names: str, key: str, meanings: Mapping[str, Any], note: str = "", theirs: Any = None, only_with: str = "",
    **notes: str,
) -> Setting:  # fmt: skip
    """Make a setting with other words for the same values; `meanings` in lower case. `notes`: by word."""

    def convert(values: Values, context: Context) -> Any:
        return meanings[" ".join(map(str, values)).lower()]

    return Setting(names, key, convert, note, theirs, 1, only_with, meanings, notes)


def absent(names: str, note: str, takes: int = 1, harmless: Mapping[str, str] = {}) -> Setting:
    """Make a setting without a key here. `note`: what to write or do in its place; `harmless`: words that mean the same
    run as none, with the reason.
    """
    reasons = {word: Needless(reason) for word, reason in harmless.items()}
    return Setting(
        names, "", lambda values, _: reasons.get(as_word(*values[:1]), Advice(note)), note, takes=takes, notes=harmless
    )


def needless(names: str, note: str, takes: int = 1) -> Setting:
    """Make a setting without a key here, which the same run does not need. `note`: why."""
    return Setting(names, "", lambda *_: Needless(note), note, takes=takes)
