"""The hardware profile of the machine that one works on: a file of the user's own, which `megascale bench profile`
writes and `--hardware this` reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megascale.core.files import write_text

THIS = "this"
"""Its name."""


def own_profile() -> Path:
    """Where it is."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "megascale" / "hardware" / f"{THIS}.toml"


def write(path: Path, tree: Mapping[str, Any], heading: str) -> None:
    """Write a profile, `tree` of tables of numbers, below a comment: whole or not at all.

    Raises: OSError
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [*(f"# {line}" for line in heading.splitlines()), *_lines(tree, ())]
    write_text(path, "\n".join(lines) + "\n")


def _lines(tree: Mapping[str, Any], name: tuple[str, ...]) -> Iterator[str]:
    plain = {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
    if name and plain:
        yield f"\n[{'.'.join(name)}]"
    yield from (f"{key} = {_value(value)}" for key, value in plain.items())
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*name, key))


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:.4g}" if isinstance(value, float) else str(value).lower()
