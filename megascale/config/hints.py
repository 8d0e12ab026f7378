"""Hints for mistakes in single keys: what to write, by the type of the key; names of other systems are recognised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic.fields import FieldInfo

from megascale.config.foreign.conversions import two_shares
from megascale.config.foreign.setting import NO_FP16, plain
from megascale.config.section import FEW_CHOICES, TableChoice
from megascale.config.value_words import A_CHOICE, literals_of, values_in_words
from megascale.core.registry import closest_name, closest_names

UNSUPPORTED: dict[str, dict[str, str]] = {
    "train.precision": dict.fromkeys(("fp16", "float16", "half", "16", "16-mixed", "fp16-mixed"), NO_FP16),
    "optimizer.name": {"sgd": "SGD is not supported: adamw, or muon for matrices"},
    "parallel.schedule": {"dualpipe": "a second copy of the weights is not supported: dualpipev, which needs none"},
}
"""Values that users of other systems know, by key and text: why there are none, and what to write."""

TRUE, FALSE = ("true", "yes", "on", "1", "1.0"), ("false", "no", "off", "0", "0.0")


def unknown_key_hint(
    key: str, value: Any, known: Sequence[str], elsewhere: Sequence[str], *, command_line: bool
) -> str:  # fmt: skip
    """Return the hint for a key that does not exist: the setting that is meant, with its value. `known`: keys of the
    table; `elsewhere`: keys of the same name in other tables.
    """
    from megascale.config.foreign.translation import translate  # for a mistake alone

    last = key.rpartition(".")[2]
    if elsewhere:
        return f"did you mean '{elsewhere[0]}'?"
    values = [] if value is None or isinstance(value, dict) else [value]
    if isinstance(value, dict) and (hint := _table_hint(last, value, known)):
        return hint
    if found := translate(key, values):
        return f"{found.hint(command_line=command_line)}; the name is {found.system}'s"
    if close := closest_name(last, known):
        return f"did you mean '{close}'?"
    if len(known) <= FEW_CHOICES or "." not in key:
        return f"known keys: {', '.join(known)}"
    similar = closest_names(last, known, 3)
    near = f"similar: {', '.join(similar)}; " if similar else ""
    return f"{near}docs/configuration.md lists all {len(known)} keys"


def _table_hint(name: str, value: Mapping[str, Any], known: Sequence[str]) -> str:
    """Return the hint for a table of another system's file: what to write for each of its keys; else ''."""
    from megascale.config.foreign.others import TABLES
    from megascale.config.foreign.translation import translate_all
    from megascale.config.toml_writer import toml_value

    if not (table := TABLES.get(plain(name))) and closest_name(name, known):
        return ""
    given = {f"{name}.{key}": [item] for key, item in value.items() if not isinstance(item, dict)}
    found = {key: one for key, one in translate_all(given) if one}
    written = {key: one for key, one in found.items() if one.key and one.value is not None}
    settings = ", ".join(f"{one.key} = {toml_value(one.value)}" for one in written.values())
    notes = [f"{key}: {one.note}" for key, one in found.items() if key not in written and one.note]
    text = "; ".join([f"write {settings}"] * bool(settings) + notes)
    return text or (f"did you mean '{table}'?" if table else "")


def unsupported(key: str, value: Any) -> str:
    """Return why a value that other systems have is not supported; else ''."""
    if key == "data.split" and isinstance(value, list) and len(value) == 3:
        return f"two shares, of training and validation: add the test share to the second, {two_shares([value], {})}"
    return UNSUPPORTED.get(key, {}).get(_text(value), "")


def _text(value: Any) -> str:
    try:
        return str(value).strip("'\"").lower()
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return ""


def value_hint(key: str, field: FieldInfo, value: Any) -> str:
    """Return what to write for a key in place of a value that it cannot have."""
    text = _text(value)
    if note := unsupported(key, value):
        return note
    literals, words = literals_of(field), values_in_words(field)
    if "`true` or `false`" in words and text in (*TRUE, *FALSE):
        meant = "true" if text in TRUE else "false"
        return f"{meant}, in lower case and without quotes" if isinstance(value, str) else meant
    if literals and (close := _closest_literal(key, text, literals)):
        return f"did you mean '{close}'?"
    table = next((part.func for part in _parts(field) if isinstance(getattr(part, "func", None), TableChoice)), None)
    if table is not None:
        return _table_choice(table, value)
    if words == [A_CHOICE]:
        words = ["one of them"]
    return _shown(field, " or ".join(map(_with_article, words)))


def _table_choice(choice: TableChoice, value: Any) -> str:
    """Return the table of the type that a value names, or of all types, with the keys that it needs."""
    named = value.get("type") if isinstance(value, dict) else value
    names = [name for name in choice.registry.names() if name == named] or choice.registry.names()
    kinds = (", ".join([f'type = "{name}"', *(f"{key} = ..." for key in choice.required(name))])
             for name in names)  # fmt: skip
    return " or ".join(f"{{{kind}}}" for kind in kinds)


def _parts(field: FieldInfo) -> list[Any]:
    arms = get_args(field.annotation)
    return [*field.metadata, *(part for arm in arms for inner in (arm, *get_args(arm)) for part in get_args(inner))]


def _shown(field: FieldInfo, words: str) -> str:
    """Add the default to the values of a key in words."""
    if field.is_required() or field.default is None or not words:
        return words or "another value"
    return f"{words}; the default is {json.dumps(field.default)}"


def _with_article(words: str) -> str:
    """Return a type in words as a noun with its article."""
    words = words.replace("`", "").replace("list of whole number", "list of whole numbers")
    words = words.replace("list of number", "list of numbers")
    starts = ("whole", "number", "list", "table")
    return f"a {words}" if words.startswith(starts) else words.replace("text", "text in quotes")


def _closest_literal(key: str, text: str, literals: Sequence[Any]) -> str | None:
    """Return the value that is nearest to a text, or that another system's word for it means."""
    from megascale.config.foreign.translation import values_of

    meant = values_of(key).get(text)
    if meant in literals:
        return str(meant)
    return closest_name(text, [literal for literal in literals if isinstance(literal, str)])
