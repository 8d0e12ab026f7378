"""Prints the measures of the package's structure: size, what training loads, hubs, cycles, long functions.

python tools/house.py [--json] [FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "megascale"

ENTRY = "megascale.train.entry"
"""The module that every rank imports first."""

MOST_LINES, MOST_FUNCTION_LINES, MOST_IMPORTS = 400, 50, 10


@dataclass(frozen=True)
class Module:
    """A module: its number of `lines`, the modules of the package that it imports when it is loaded (`loads`) or for
    types as well (`names`), its functions with their lines, and those that take a whole RunConfig.
    """

    lines: int
    loads: frozenset[str]
    names: frozenset[str]
    functions: Mapping[str, int]
    takes_config: tuple[str, ...]


def read_package(root: Path) -> dict[str, Module]:
    """Return the modules of the package in a folder, by their names."""
    trees, lines = {}, {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        trees[name], lines[name] = ast.parse(text), text.count("\n")
    return {name: _module(tree, lines[name], trees.keys()) for name, tree in trees.items()}


def _module(tree: ast.Module, lines: int, known: Collection[str]) -> Module:
    loads = {each for node in _loaded(tree) for each in _imported(node, known)}
    names = {each for node in tree.body for each in _imported(node, known)} | {
        each for node in tree.body if isinstance(node, ast.If) for one in node.body for each in _imported(one, known)
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Module(
        lines,
        frozenset(loads),
        frozenset(names | loads),
        {function.name: (function.end_lineno or 0) - function.lineno + 1 for function in functions},
        tuple(function.name for function in functions if _takes_config(function)),
    )


def _loaded(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported: not those for types alone."""
    for node in tree.body:
        if not isinstance(node, ast.If):
            yield node
        elif not ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from node.body


def _imported(node: ast.stmt, known: Collection[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom) and (module := node.module) and module in known:
        for alias in node.names:
            yield f"{module}.{alias.name}" if f"{module}.{alias.name}" in known else module


def _takes_config(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = function.args
    each = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return any(one.annotation is not None and "RunConfig" in ast.unparse(one.annotation) for one in each)


def closure(modules: Mapping[str, Module], entry: str) -> set[str]:
    """Return the modules that are loaded with one, and the packages in which they are."""
    found, left = set[str](), [entry]
    while left:
        name = left.pop()
        if name in modules and name not in found:
            found.add(name)
            left += [*modules[name].loads, name.rpartition(".")[0]]
    return found


def cycles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Return the groups of modules that name each other in a circle, types included."""
    reach = {name: _reached(modules, name) for name in modules}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in modules}
    return sorted(sorted(group) for group in groups if group)


def _reached(modules: Mapping[str, Module], name: str) -> set[str]:
    found, left = set[str](), list(modules[name].names)
    while left:
        at = left.pop()
        if at not in found:
            found.add(at)
            left += modules[at].names
    return found


def measures(root: Path) -> dict[str, int | list[str]]:
    """Return the measures by their names: a number, or the offenders."""
    modules = read_package(root)
    loaded = closure(modules, ENTRY)
    top = [path for path in (root / PACKAGE).iterdir() if not path.name.startswith("__") and path.name != "py.typed"]
    return {
        "lines": sum(module.lines for module in modules.values()),
        "modules": len(modules),
        "modules that training loads": len(loaded),
        "lines that training loads": sum(modules[name].lines for name in loaded),
        f"modules over {MOST_LINES} lines": [name for name, each in modules.items() if each.lines > MOST_LINES],
        f"functions over {MOST_FUNCTION_LINES} lines": [
            f"{name}.{function}" for name, each in modules.items() for function, lines in each.functions.items()
            if lines > MOST_FUNCTION_LINES
        ],
        "import cycles": [", ".join(group) for group in cycles(modules)],
        f"modules with more than {MOST_IMPORTS} imports from the package": [
            name for name, each in modules.items() if len(each.loads) > MOST_IMPORTS
        ],
        "functions that take a whole RunConfig": [
            f"{name}.{function}" for name, each in modules.items() for function in each.takes_config
        ],
        "entries of the package's folder": len(top),
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent.parent, help="a checkout")
    parser.add_argument("--json", action="store_true", help="print all names as one JSON object")
    arguments = parser.parse_args()
    found = measures(arguments.folder)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{value if isinstance(value, int) else len(value):8,}  {name}")


if __name__ == "__main__":
    main()
