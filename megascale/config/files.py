"""Reading configuration files: TOML, `extends`, command-line overrides, and the place that each value came from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascale.core.errors import ConfigError, Problem

Tree = dict[str, Any]

_TABLE = re.compile(r"^\s*\[([A-Za-z0-9_.\-\s]+)\]")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\-]+)\s*=")


@dataclass
class Source:
    """A configuration as written: nested values, and for each dotted key the `file:line` that set it."""

    path: str
    tree: Tree = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def place(self, key: str) -> str:
        """Where `key` was set, else where its section is, else the file."""
        while key:
            if key in self.places:
                return self.places[key]
            key = key.rpartition(".")[0]
        return self.path


def read(path: str, overrides: Sequence[str] = ()) -> Source:
    """Read a TOML file with what it extends, then apply `section.key=value` overrides.

    Raises: ConfigError for a missing file, bad syntax, a circle of `extends`, or an override without `=`.
    """
    source = _read_file(Path(path), seen=())
    source.path = path
    problems = []
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(Problem("command line", text, "not a setting", "write section.key=value"))
            continue
        _set(source.tree, key.split("."), _parse_value(value.strip()))
        source.places[key] = "command line"
    if problems:
        raise ConfigError(problems)
    return source


def _read_file(path: Path, seen: tuple[Path, ...]) -> Source:
    if path.resolve() in seen:
        chain = " -> ".join(str(p) for p in (*seen, path))
        raise ConfigError([Problem(str(path), "extends", f"goes round in a circle: {chain}", "remove one of them")])
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError([Problem(str(path), "", "there is no such file", "check the path")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), "", f"cannot be read: {error}")]) from None
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        where = f"{path}:{line.group(1)}" if line else str(path)
        raise ConfigError(
            [Problem(where, "", f"is not TOML: {error}", "strings need quotes, tables need [brackets]")]
        ) from None
    own = Source(str(path), tree, {key: f"{path}:{line}" for key, line in _lines(text).items()})
    base = own.tree.pop("extends", None)
    if base is None:
        return own
    if not isinstance(base, str):
        where = own.place("extends")
        raise ConfigError(
            [Problem(where, "extends", f"must be the name of a file, not {base!r}", 'extends = "other.toml"')]
        )
    parent_path = path.parent / base
    if not parent_path.is_file():
        where = own.place("extends")
        raise ConfigError(
            [Problem(where, "extends", f"there is no file {parent_path}", "the path counts from this file")]
        )
    parent = _read_file(parent_path, (*seen, path.resolve()))
    return Source(str(path), _merge(parent.tree, own.tree), parent.places | own.places)


def _lines(text: str) -> dict[str, int]:
    """The line of each table and key. Lines inside a multi-line string may be taken for keys; nothing asks for
    those.
    """
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _TABLE.match(line):
            table = re.sub(r"\s", "", match.group(1))
            lines.setdefault(table, number)
        elif match := _KEY.match(line):
            lines.setdefault(f"{table}.{match.group(1)}" if table else match.group(1), number)
    return lines


def _merge(base: Tree, top: Tree) -> Tree:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _set(tree: Tree, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        branch = tree.get(key)
        if not isinstance(branch, dict):
            branch = tree[key] = {}
        tree = branch
    tree[keys[-1]] = value


def _parse_value(text: str) -> Any:
    """A TOML value; a word that is none (gpipe, 1f1b, data/corpus) is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
