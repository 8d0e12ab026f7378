"""Writing a configuration down so that it runs again as it is."""

from __future__ import annotations

import json
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


def _value(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)  # keeps every digit, and the '.' or 'e' that makes it a float
    text = json.dumps(value, ensure_ascii=False)  # JSON's strings, booleans, integers and arrays are TOML's
    return text.replace("\x7f", "\\u007f")  # but for this character, which TOML wants escaped
