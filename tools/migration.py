"""The tables of docs/from-megatron.md: settings of Megatron-LM and torchtitan with those here, and other defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megascale.config.foreign import megatron
from megascale.config.foreign.others import TORCHTITAN
from megascale.config.foreign.setting import Setting
from megascale.config.loading import sections

PAGE = Path(__file__).parents[1] / "docs" / "from-megatron.md"

GROUPS = {
    "Model": megatron.MODEL, "Parallelism and batch": megatron.PARALLEL, "Training": megatron.TRAIN,
    "Optimizer": megatron.OPTIMIZER, "Data": megatron.DATA, "Checkpoints": megatron.CHECKPOINT,
    "Logs, profiles and faults": megatron.OBSERVE,
}  # fmt: skip


def page() -> str:
    """Return the page with current tables between their marks."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in (("defaults", list(defaults())), ("settings", list(settings()))):
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        text = "".join([before, begin, *(f"{line}\n" for line in lines), end, rest.partition(end)[2]])
    return text


def defaults() -> Iterator[str]:
    """Tabulate the settings of Megatron-LM with another default."""
    yield from _head("key", "Megatron-LM", "its default", "default here")
    for setting in megatron.SETTINGS:
        if setting.theirs:
            yield _row([f"`{setting.key}`", _names(setting), setting.theirs, f"`{default_of(setting.key)}`"])


def default_of(key: str) -> str:
    """Return the default of a key as TOML."""
    table, _, name = key.rpartition(".")
    fields = {field.alias or attribute: field for attribute, field in sections()[table].model_fields.items()}
    field = fields[name]
    return "required" if field.is_required() else json.dumps(field.default)


def settings() -> Iterator[str]:
    """Tabulate all settings of Megatron-LM with torchtitan's for the same key, then the rest of torchtitan's."""
    theirs: dict[str, list[Setting]] = {}
    for setting in TORCHTITAN:
        theirs.setdefault(setting.key, []).append(setting)
    for heading, group in GROUPS.items():
        yield from ("", f"### {heading}", "", *_head("Megatron-LM", "torchtitan", "write", "note"))
        for setting in group:
            same = theirs.pop(setting.key, []) if setting.key else []
            notes = [_note(setting), *(f"torchtitan: {note}" for one in same if (note := _note(one)))]
            yield _row([_names(setting), ", ".join(map(_names, same)), _key(setting), "; ".join(filter(None, notes))])
    yield from ("", "### torchtitan alone", "", *_head("torchtitan", "write", "note"))
    for setting in (one for rows in theirs.values() for one in rows):
        yield _row([_names(setting), _key(setting), _note(setting)])
    yield ""


def _key(setting: Setting) -> str:
    """Return the key, with the value of a switch."""
    if not setting.key:
        return ""
    try:
        value = setting.convert((), {}) if setting.takes == 0 else None
    except LookupError:
        value = None
    return f"`{setting.key}`" if value is None else f"`{setting.key} = {json.dumps(value)}`"


def _note(setting: Setting) -> str:
    """Return the note, with the words whose spelling here is another."""
    other = {word: value for word, value in setting.meanings.items() if word != value}
    words = ", ".join(f"`{word}` is `{json.dumps(value)}`" for word, value in other.items())
    return "; ".join(filter(None, [words, setting.note]))


def _names(setting: Setting) -> str:
    return ", ".join(f"`{name}`" for name in setting.names)


def _head(*columns: str) -> tuple[str, str]:
    return _row(list(columns)), _row(["---"] * len(columns))


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
