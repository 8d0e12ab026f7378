"""Writing of configurations as TOML, and comparison with a saved configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megascale.config.run import RunConfig


def to_toml(config: RunConfig) -> str:
    """Format a configuration as TOML, without keys that have no value."""
    tree = config.model_dump(by_alias=True, exclude_none=True, mode="json")
    lines = [f"{key} = {toml_value(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    lines += ["\n" + section_to_toml(table, keys) for table, keys in tree.items() if isinstance(keys, dict)]
    return "\n".join(lines) + "\n"


def section_to_toml(name: str, keys: Mapping[str, Any]) -> str:
    """Format a section as TOML."""
    return "\n".join([f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in keys.items())])


LOSS_SECTIONS = ("model", "moe", "batch", "train", "fp8", "optimizer", "data")
"""Sections that determine the losses of a run; the other sections only affect execution."""


def config_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """List the changes in LOSS_SECTIONS from a saved to the current configuration, both as
    `RunConfig.model_dump(by_alias=True, mode="json")`.
    """
    return [
        f"{section}.{key} {toml_value(saved[section][key])} -> {toml_value(value)}"
        for section in LOSS_SECTIONS
        for key, value in current[section].items()
        if key in saved.get(section, {}) and saved[section][key] != value
    ]


def toml_value(value: Any) -> str:
    """Format a value as TOML, a date as text."""
    if isinstance(value, float):
        return repr(value)  # keeps every digit, and the '.' or 'e' that makes it a float
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    # JSON's strings, booleans, integers and arrays are TOML's
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text.replace("\x7f", "\\u007f")  # the one character that JSON leaves and TOML escapes
