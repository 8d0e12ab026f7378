"""Writing a configuration down so that it runs again as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megascale.config.run import RunConfig


def to_toml(config: RunConfig) -> str:
    """The configuration as TOML: every key with its value, keys without a value left out."""
    tree = config.model_dump(by_alias=True, exclude_none=True, mode="json")
    lines = [f"{key} = {_value(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for table, keys in tree.items():
        if isinstance(keys, dict):
            lines += ["", f"[{table}]", *(f"{key} = {_value(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


REPEATED = ("model", "batch", "train", "fp8", "optimizer", "data")
"""The sections that the losses of a run follow from; the others only say how and where it is computed."""


def changes(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """What a configuration changes in a run, against one saved as `model_dump(by_alias=True, mode="json")`."""
    ours = config.model_dump(by_alias=True, mode="json")
    return [
        f"{section}.{key} {_value(saved[section][key])} -> {_value(value)}"
        for section in REPEATED
        for key, value in ours[section].items()
        if key in saved.get(section, {}) and saved[section][key] != value
    ]


def _value(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)  # keeps every digit, and the '.' or 'e' that makes it a float
    text = json.dumps(value, ensure_ascii=False)  # JSON's strings, booleans, integers and arrays are TOML's
    return text.replace("\x7f", "\\u007f")  # but for this character, which TOML wants escaped
