"""Writer of hardware profiles as TOML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megascale.core.files import write_text


def write_profile(path: Path, tree: Mapping[str, Any], heading: str) -> None:
    """Write a profile's nested tables below a comment, atomically.

    Raises: OSError
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [*(f"# {line}" for line in heading.splitlines()), *_lines(tree, "")]
    write_text(path, "\n".join(lines) + "\n")


def _lines(tree: Mapping[str, Any], table: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{table}{key}.")
        else:
            yield f"{table}{key} = {f'{value:.4g}' if isinstance(value, float) else str(value).lower()}"
