"""Translations of settings of other systems: the setting to write here with its value, or the reason for none."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megascale.config.foreign.megatron import SETTINGS as MEGATRON
from megascale.config.foreign.megatron_others import BEGINNINGS
from megascale.config.foreign.others import DEEPSPEED, NEMO, TORCHTITAN, TORCHTITAN_BEGINNINGS, TRANSFORMERS
from megascale.config.foreign.setting import Advice, Context, Needless, Setting, Several, Values, as_word, plain
from megascale.config.toml_writer import toml_value

SYSTEMS: dict[str, tuple[Setting, ...]] = {
    "Megatron-LM": MEGATRON, "torchtitan": TORCHTITAN, "NeMo": NEMO, "DeepSpeed": DEEPSPEED,
    "transformers": TRANSFORMERS,
}  # fmt: skip

FAILURES = (LookupError, TypeError, ValueError, ArithmeticError)
"""Errors of a conversion for a value without a counterpart."""


@dataclass(frozen=True)
class Translation:
    """The setting to write in place of a setting of `system`. `key`: the key here, empty if there is none; `value`: its
    value, None where unknown; `needless`: the run is the same without it; `converted`: the value is not theirs.
    """

    system: str
    key: str
    value: Any
    note: str
    needless: bool = False
    converted: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings to write, by key."""
        return self.value if isinstance(self.value, Several) else {self.key: self.value}

    def hint(self, *, command_line: bool) -> str:
        """Say what to write, on a command line or in a file."""
        if not self.key:
            return self.note
        if self.value is None:
            text = f"{self.key}=..." if command_line else f"{self.key} = ..."
        elif command_line:
            text = " ".join(assignment(key, value) for key, value in self.settings.items())
        else:
            text = ", ".join(f"{key} = {toml_value(value)}" for key, value in self.settings.items())
        return f"write {text}" + (f" ({self.note})" if self.note else "")


@cache
def _by_name(of: str) -> dict[str, tuple[str, Setting]]:
    """Return system and setting by `plain` name, whole and without its table: the first of each name."""
    systems = {"": SYSTEMS, "NeMo": {"NeMo": NEMO, "Megatron-LM": MEGATRON}}.get(of) or {of: SYSTEMS[of]}
    named = [(system, setting, name) for system, rows in systems.items() for setting in rows for name in setting.names]
    found: dict[str, tuple[str, Setting]] = {}
    for shorten in (False, True):
        for system, setting, name in named:
            key = plain(name)
            if not of and key == setting.key:
                continue  # ours, too
            found.setdefault(key.rpartition(".")[2] if shorten else key, (system, setting))
    return found


def find(name: str, of: str = "") -> tuple[str, Setting] | None:
    """Return system and setting of a name, with or without dashes and table; None for an unknown name. `of`: the one
    system to look at, "" for all.
    """
    key = plain(name)
    for known in (key,) if of == "torchtitan" else (key, key.rpartition(".")[2]):
        if known in _by_name(of):
            return _by_name(of)[known]
    system, rows = ("torchtitan", TORCHTITAN_BEGINNINGS) if of == "torchtitan" else ("Megatron-LM", BEGINNINGS)
    return next(((system, setting) for setting in rows if key.startswith(setting.names)), None)


def translate(name: str, values: Values = (), context: Context | None = None, of: str = "") -> Translation | None:
    """Return what to write in place of a setting with these values; None for an unknown name. `of`: as of `find`."""
    if (found := find(name, of)) is None:
        return None
    system, setting = found
    value, own = None, setting.notes.get(as_word(values[0]), "") if len(values) == 1 else ""
    if values or not setting.takes or not setting.key:
        try:
            value = setting.convert(values, {plain(name).rpartition(".")[2]: values} | dict(context or {}))
        except FAILURES:
            value = None
    if isinstance(value, Advice):
        return Translation(system, "", None, value, isinstance(value, Needless))
    if value is None and own:
        return Translation(system, "", None, own)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        value = int(value)
    known = value is not None and setting.meanings and "not supported" in setting.note
    other = str(value).lower() != str(values[0]).lower() if values else "not supported" in setting.note
    return Translation(system, setting.key, value, own or ("" if known else setting.note), converted=other)


def context_of(given: Mapping[str, Values]) -> dict[str, Values]:
    """Return settings that are given together by `plain` name, whole and without its table."""
    named = {plain(name): values for name, values in given.items()}
    return {name.rpartition(".")[2]: values for name, values in named.items()} | named


def translate_all(given: Mapping[str, Values]) -> Iterator[tuple[str, Translation | None]]:
    """Yield the translation of each of the settings given together, by name; None for an unknown one."""
    context = context_of(given)
    for name, values in given.items():
        yield name, translate(name, values, context)


def values_of(key: str) -> dict[str, Any]:
    """Return the words of other systems for the values of a key."""
    rows = [setting for settings in SYSTEMS.values() for setting in settings if setting.key == key]
    return {word: value for setting in reversed(rows) for word, value in setting.meanings.items()}


def read_flags(words: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each flag of a command line: as many as it takes, or up to the next flag; under "" words
    that are neither a value nor a setting.
    """
    flags: dict[str, list[Any]] = {}
    name, left = "", 0
    for word in words:
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            name, equals, value = word.partition("=")
            flags[name] = [read_value(value)] if equals else []
            found = find(name)
            left = 0 if equals else found[1].takes if found else 1
        elif left and not (OURS.match(word) or word.endswith(".toml")):
            flags[name].append(read_value(word))
            left -= 1
        elif "=" not in word and not word.endswith(".toml"):
            flags.setdefault("", []).append(word)
    return flags


def is_ours(name: str) -> bool:
    """Return True for the name of a key, with its table."""
    from megascale.config.loading import keys_named

    table, key = [*name.split("."), ""][:2]
    return f"{table}.{key}" in keys_named(key)


OURS = re.compile(r"[a-z0-9_]+\.[a-z0-9_.]+=")
"""The beginning of a setting, which is no flag's value."""

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def read_value(word: str) -> Any:
    """Read a value of a command line: a number, a boolean, a list, or text."""
    if _NUMBER.fullmatch(word):
        return int(word) if word.lstrip("+-").isdecimal() else float(word)
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except (ValueError, RecursionError):
        return word


def assignment(key: str, value: Any) -> str:
    """Format a setting as a word of a command line."""
    return shlex.quote(f"{key}={value}") if isinstance(value, str) else shlex.quote(f"{key}={toml_value(value)}")
