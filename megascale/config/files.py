"""Reading configuration files: TOML, `extends`, command-line overrides, and the place that each value came from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascale.core.errors import ConfigError, Problem
from megascale.core.files import readable

Tree = dict[str, Any]

_WORD = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_NAME = rf"({_WORD}(?:\s*\.\s*{_WORD})*)"
_TABLE = re.compile(rf"\s*\[\[?\s*{_NAME}\s*\]")
_KEY = re.compile(rf"\s*{_NAME}\s*=\s*")
_INLINE_KEY = re.compile(rf"[{{,]\s*{_NAME}\s*=")


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

    def set(self, keys: list[str], value: Any) -> None:
        """Set a value from the command line."""
        tree = self.tree
        for depth, key in enumerate(keys, start=1):
            branch = tree.get(key)
            if depth == len(keys) or not isinstance(branch, dict):
                place = ".".join(keys[:depth])
                self.places = {k: v for k, v in self.places.items() if not k.startswith(f"{place}.")}
                self.places[place] = "command line"
                branch = tree[key] = {} if depth < len(keys) else value
            tree = branch


def read(path: str, overrides: Sequence[str] = (), is_text: Callable[[str], bool] = lambda key: False) -> Source:
    """Read a TOML file with what it extends, then apply `section.key=value` overrides. `is_text`: whether a key takes a
    text, so that `name=2026` needs no quotes.

    Raises: ConfigError for a missing file, bad syntax, a circle of `extends`, or an override without `=`.
    """
    source = _read_file(Path(path), seen=())
    source.path = path
    override(source, overrides, is_text)
    return source


def override(source: Source, overrides: Sequence[str], is_text: Callable[[str], bool]) -> None:
    """Apply `section.key=value` overrides.

    Raises: ConfigError for one without `=`.
    """
    problems = []
    for text in overrides:
        key, equals, value = text.partition("=")
        keys = [part.strip() for part in key.split(".")]
        if equals and all(keys):
            parsed = _parse_value(value.strip())
            plain = is_text(".".join(keys)) and not isinstance(parsed, str | list)
            source.set(keys, value.strip() if plain else parsed)
        else:
            problems.append(Problem("command line", text, "not a setting", "write section.key=value"))
    if problems:
        raise ConfigError(problems)


def _read_file(path: Path, seen: tuple[Path, ...]) -> Source:
    try:
        text = path.read_text(encoding="utf-8-sig")
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError([Problem(str(path), "", "there is no such file", "check the path")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), "", f"cannot be read: {error}", "give a TOML file in UTF-8")]) from None
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: a number of 5,000 digits, 1,000 brackets
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
    if not readable(parent_path):
        where = own.place("extends")
        raise ConfigError(
            [Problem(where, "extends", f"there is no file {parent_path}", "the path counts from this file")]
        )
    seen = (*seen, path.resolve())
    if parent_path.resolve() in seen:
        where = own.place("extends")
        raise ConfigError([Problem(where, "extends", f"goes round in a circle to {parent_path}", "remove one of them")])
    parent = _read_file(parent_path, seen)
    return Source(str(path), _merge(parent.tree, own.tree), parent.places | own.places)


def _lines(text: str) -> dict[str, int]:
    """The line of each table and key. Lines inside a multi-line string may be taken for keys; nothing asks for
    those.
    """
    lines: dict[str, int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.split("\n"), start=1):
        found = []
        if match := _TABLE.match(line):
            table = _words(match[1])
            found = [table]
        elif match := _KEY.match(line):
            key = (*table, *_words(match[1]))
            inline = _INLINE_KEY.findall(line, match.end()) if line.startswith("{", match.end()) else []
            found = [key, *((*key, *_words(name)) for name in inline)]
        for path in found:
            for depth in range(1, len(path) + 1):
                lines.setdefault(".".join(path[:depth]), number)
    return lines


def _words(name: str) -> tuple[str, ...]:
    return tuple(word.strip("\"'") for word in re.findall(_WORD, name))


def _merge(base: Tree, top: Tree) -> Tree:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _parse_value(text: str) -> Any:
    """A TOML value; a word that is none (gpipe, 1f1b, data/corpus) is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text
