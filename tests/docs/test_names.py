"""Modules, and names in modules, that pages and docstrings mention exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from megascale.config.foreign.translation import SYSTEMS
from megascale.config.run import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [path for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]) if path.name != "CHANGELOG.md"]
CODE = [path for folder in ("megascale", "tools", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
PACKAGE = {path for path in CODE if path.is_relative_to(ROOT / "megascale")}
ROOMS = {folder.name for path in PACKAGE for folder in path.relative_to(ROOT / "megascale").parents if folder.name}
DOTTED = re.compile(r"`([a-z_][a-z_0-9]*(?:\.[A-Za-z_][A-Za-z_0-9]*)+)`")
FILES = ("json", "toml", "safetensors")
"""Endings that look like names in a module."""

OTHERS = {"config.options", *(name for rows in SYSTEMS.values() for one in rows for name in one.names)}
"""Names that are of no module: an argument of a page's example, and settings of other systems."""


@cache
def defined(path: Path) -> frozenset[str]:
    """The names that a module defines or imports, in classes and functions, too."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return frozenset(found)


@cache
def modules_by_ending() -> dict[str, list[Path]]:
    """Modules by each of the endings of their dotted names, which prose may shorten: "driver.job"."""
    found = defaultdict(list)
    for path in PACKAGE:
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        for first in range(len(parts)):
            found[".".join(parts[first:])].append(path)
    return found


def is_there(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        for path in modules_by_ending().get(".".join(parts[:count]), ()):
            if count == len(parts) or parts[count] in defined(path):
                return True
    return False


def is_key(name: str) -> bool:
    section, key, *_ = name.split(".")
    field = RunConfig.model_fields.get(section)
    keys = getattr(field.annotation, "model_fields", {}) if field is not None else {}
    return key in keys or key in {one.alias for one in keys.values()}


def docstrings(source: str) -> str:
    nodes = ast.walk(ast.parse(source))
    texts = (node.value for node in nodes if isinstance(node, ast.Expr))
    return "\n".join(text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str))


def missing(text: str) -> list[str]:
    named = (name for name in DOTTED.findall(text) if name.split(".")[0] in ROOMS and name not in OTHERS)
    return [name for name in named if not (name.endswith(FILES) or is_key(name) or is_there(name))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    assert not missing(page.read_text(encoding="utf-8"))


def test_modules_that_docstrings_name_exist() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in CODE}
    odd = {name: source for name, source in sources.items() if missing(source)}  # the others need no parsing
    assert not {name: names for name, source in odd.items() if (names := missing(docstrings(source)))}


def test_a_name_of_no_module_is_found() -> None:
    assert missing(
        "`optim.subspaces` and `driver.job.Jobs`, but `optim.adamw`, `data.attention_mask`, `driver.job.Job`"
    ) == [
        "optim.subspaces",
        "driver.job.Jobs",
    ]
