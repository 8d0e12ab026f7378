"""The tables of docs/from-megatron.md: settings of Megatron-LM and torchtitan with those here, and other defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator

from megascale.config.foreign import megatron
from megascale.config.foreign.others import TORCHTITAN
from megascale.config.foreign.setting import Setting
from megascale.config.loading import sections
from results import pipes

GROUPS = {
    "Model": megatron.MODEL, "Mixture of experts": megatron.EXPERTS, "Parallelism and batch": megatron.PARALLEL,
    "Training": megatron.TRAIN, "Optimizer": megatron.OPTIMIZER, "Data": megatron.DATA,
    "Checkpoints": megatron.CHECKPOINT, "Logs, profiles and faults": megatron.OBSERVE,
    "Other arguments": megatron.OTHERS,
}  # fmt: skip


def defaults() -> list[str]:
    """Tabulate the settings of Megatron-LM with another default."""
    other = [setting for setting in megatron.SETTINGS if setting.theirs is not None]
    rows = [[f"`{one.key}`", _names(one), f"`{json.dumps(one.theirs)}`", f"`{default_of(one.key)}`"] for one in other]
    return pipes(["key", "Megatron-LM", "its default", "default here"], *rows)


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
        rows = []
        for setting in group:
            same = theirs.pop(setting.key, []) if setting.key else []
            notes = [_note(setting), *(f"torchtitan: {note}" for one in same if (note := _note(one)))]
            rows.append([_names(setting), ", ".join(map(_names, same)), _key(setting), "; ".join(filter(None, notes))])
        yield from (f"### {heading}", "", *pipes(["Megatron-LM", "torchtitan", "write", "note"], *rows), "")
    rows = [[_names(one), _key(one), _note(one)] for one in TORCHTITAN if one in theirs.get(one.key, [])]
    yield from ("### torchtitan alone", "", *pipes(["torchtitan", "write", "note"], *rows))


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
    """Return the note, with the words whose spelling here is another, and the notes on single words."""
    other = {word: value for word, value in setting.meanings.items() if word != value}
    words = ", ".join(f"`{word}` is `{json.dumps(value)}`" for word, value in other.items())
    single = (f"`{word}`: {note}" for word, note in setting.notes.items())
    return "; ".join(filter(None, [words, setting.note, *single]))


def _names(setting: Setting) -> str:
    return ", ".join(f"`{name}`" for name in setting.names)
