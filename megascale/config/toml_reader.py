"""Reading of configuration files: TOML, `extends`, command-line overrides, and the location of every value."""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascale.config.renamed import with_present_names
from megascale.core.errors import ConfigError, Problem
from megascale.core.files import exists, is_file, pointer_notice, why_unreadable

Tree = dict[str, Any]

_WORD = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_NAME = rf"({_WORD}(?:\s*\.\s*{_WORD})*)"
_TABLE = re.compile(rf"\s*\[\[?\s*{_NAME}\s*\]")
_KEY = re.compile(rf"\s*{_NAME}\s*=\s*")
_INLINE_KEY = re.compile(rf"[{{,]\s*{_NAME}\s*=")

SYNTAX = {
    r"Cannot overwrite|twice": "a key or a table is given twice: keep one",
    r"\n\s*\{": "this is JSON: write TOML, key = value below [table]",
    r"\n\s*(---|- |[\w-]+:(\s|$))": "this is YAML: write TOML, key = value below [table]",
    r"\n.*=\s*(True|False)\b": "true and false are in lower case",
    r"\n.*=\s*(None|null)\b": "TOML has no such value: leave out the key",
    r"newline or end of document(.*)\n.*,\s*(#.*)?$": "no comma behind a value",
    r"": "strings need quotes, tables need [brackets]",
}
"""Hints, by patterns of an error of TOML's reader with the line that it is about below: the first pattern counts."""

OWN_FILES = Path(__file__).parents[1]
"""The package, whose folder `configs` is that of the repository."""

QUOTE_NAMES = """quote text in a list or table: 'data.train=[[0.7, "mine/train"], [0.3, "other/train"]]'"""


@dataclass
class Source:
    """A configuration before checks: nested values, and the location (`file:line` or `command line`) of dotted keys.
    `moved_from`: the folder that the configuration in a run's folder names, if it lies in another.
    """

    path: str
    tree: Tree = field(default_factory=dict)
    locations: dict[str, str] = field(default_factory=dict)
    moved_from: Path | None = None

    def location(self, key: str) -> str:
        """Return the location of `key`, else of its section, else the file."""
        while key:
            if key in self.locations:
                return self.locations[key]
            key = key.rpartition(".")[0]
        return self.path

    def set(self, keys: list[str], value: Any) -> None:
        tree = self.tree
        for depth, key in enumerate(keys, start=1):
            branch = tree.get(key)
            if depth == len(keys) or not isinstance(branch, dict):
                place = ".".join(keys[:depth])
                self.locations = {k: v for k, v in self.locations.items() if not k.startswith(f"{place}.")}
                self.locations[place] = "command line"
                branch = tree[key] = {} if depth < len(keys) else value
            tree = branch


def read_toml(path: str, overrides: Sequence[str] = (), is_text: Callable[[str], bool] = lambda key: False) -> Source:
    """Read a TOML file and its `extends`, then apply `section.key=value` overrides. A path `configs/...` names a file
    of the package if the current folder has none. `is_text`: returns True for keys of type str, whose overrides need no
    quotes (`name=2026`).

    Raises: ConfigError for a missing file, invalid syntax, a circular `extends`, or an override without `=`.
    """
    file = Path(path)
    if file.parts[:1] == ("configs",) and not exists(file) and is_file(OWN_FILES / file):
        file = OWN_FILES / file
    source = _read_file(file, seen=())
    source.path = path
    apply_overrides(source, overrides, is_text)
    return source


def apply_overrides(source: Source, overrides: Sequence[str], is_text: Callable[[str], bool]) -> None:
    """Apply `section.key=value` overrides.

    Raises: ConfigError for an override without `=`.
    """
    problems = []
    for text in overrides:
        key, equals, value = text.partition("=")
        keys = [part.strip() for part in key.split(".")]
        if equals and all(keys):
            parsed = _parse_value(value.strip())
            if isinstance(parsed, str) and value.strip().startswith(("[", "{")):
                problems.append(Problem("command line", key, f"{value} is not TOML", QUOTE_NAMES))
                continue
            plain = is_text(".".join(keys)) and not isinstance(parsed, str | list | dict)
            source.set(keys, value.strip() if plain else parsed)
        else:
            problems.append(Problem("command line", text, "not a setting", _no_setting_hint(text, overrides)))
    if problems:
        raise ConfigError(problems)


def _no_setting_hint(text: str, words: Sequence[str]) -> str:
    """Return the setting that a name of another system means, with the next word as its value."""
    from megascale.config.foreign.translation import is_ours, read_value, translate  # for a mistake alone

    if text.endswith(".toml"):
        return f'one file, which may begin with extends = "{text}"'
    if is_ours(text):
        return f"write {text}=..."
    following = words[words.index(text) + 1 :][:1]
    found = translate(text, [read_value(word) for word in following if "=" not in word])
    return f"{found.hint(command_line=True)}; the name is {found.system}'s" if found else "write section.key=value"


def _mistake(where: str, key: str, message: str, hint: str) -> ConfigError:
    return ConfigError([Problem(where, key, message, hint)])


def _read_file(path: Path, seen: tuple[Path, ...]) -> Source:
    try:
        text = path.read_text(encoding="utf-8-sig")
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise _mistake(str(path), "", "there is no such file", "check the path") from None
    except IsADirectoryError:
        hint = f"did you mean {config}?" if is_file(config := path / "config.toml") else "give a TOML file"
        raise _mistake(str(path), "", "is a folder", hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _mistake(str(path), "", f"cannot be read: {error}", "give a TOML file in UTF-8") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, integers of 5,000 digits, 1,000 brackets
        if notice := pointer_notice(path):
            raise _mistake(str(path), "", notice, "the file itself") from None
        line = int(found[1]) if (found := re.search(r"line (\d+)", str(error))) else 0
        wrong = "\n".join([str(error), *text.split("\n")[line - 1 : line]])
        hint = next(hint for pattern, hint in SYNTAX.items() if re.search(pattern, wrong, re.MULTILINE))
        raise _mistake(f"{path}:{line}" if line else str(path), "", f"is not TOML: {error}", hint) from None
    source = Source(str(path), tree, {key: f"{path}:{line}" for key, line in _lines(text).items()})
    _name_own_folder(source, path.absolute().parent if path.name == "config.toml" else None)
    base, where = source.tree.pop("extends", None), source.location("extends")
    if base is None:
        return source
    if not isinstance(base, str):
        raise _mistake(where, "extends", f"must be the name of a file, not {base!r}", 'extends = "other.toml"')
    parent_path = path.parent / base
    if reason := why_unreadable(parent_path):
        raise _mistake(where, "extends", reason, "the path is relative to this file")
    seen = (*seen, path.resolve())
    if parent_path.resolve() in seen:
        raise _mistake(where, "extends", f"circular: leads back to {parent_path}", "remove one of them")
    parent = _read_file(parent_path, seen)
    moved_from = source.moved_from or parent.moved_from
    return Source(str(path), _merge(parent.tree, source.tree), parent.locations | source.locations, moved_from)


def _name_own_folder(source: Source, folder: Path | None) -> None:
    """Have the configuration in a run's folder name this folder: a run that was moved or copied goes on in its own. The
    version of the run may be an earlier one.
    """
    if folder is None or not is_file(folder / "metrics.jsonl", optional=True):
        return
    source.tree = with_present_names(source.tree)
    if "output_dir" not in source.tree:
        return
    named = Path(str(source.tree["output_dir"])) / str(source.tree.get("name"))
    with contextlib.suppress(OSError):  # the folder that it names is gone
        if named.samefile(folder):
            return
    source.moved_from = named
    source.tree["name"], source.tree["output_dir"] = folder.name, str(folder.parent)
    source.locations["name"] = source.locations["output_dir"] = f"the folder of {source.path}"


def _lines(text: str) -> dict[str, int]:
    """Return the line number of every table and key. Text in multi-line strings may add keys, which have no reader."""
    lines: dict[str, int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.split("\n"), start=1):
        paths = []
        if match := _TABLE.match(line):
            table = _words(match[1])
            paths = [table]
        elif match := _KEY.match(line):
            key = (*table, *_words(match[1]))
            inline = _INLINE_KEY.findall(line, match.end()) if line.startswith("{", match.end()) else []
            paths = [key, *((*key, *_words(name)) for name in inline)]
        for path in paths:
            for depth in range(1, len(path) + 1):
                lines.setdefault(".".join(path[:depth]), number)
    return lines


def _words(name: str) -> tuple[str, ...]:
    return tuple(word.strip("\"'") for word in re.findall(_WORD, name))


def dotted(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key."""
    found = dict[str, Any]()
    for key, value in tree.items():
        found |= dotted(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return found


def _merge(base: Tree, top: Tree) -> Tree:
    merged = dict(base)
    for key, value in top.items():
        base_value = merged.get(key)
        merged[key] = _merge(base_value, value) if isinstance(base_value, dict) and isinstance(value, dict) else value
    return merged


def _parse_value(text: str) -> Any:
    """Parse a TOML value; any other text (gpipe, 1f1b, data/corpus) is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text
