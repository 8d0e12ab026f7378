"""Nothing in the package unpickles, or runs text: neither a peer nor a file can make a rank run code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megascale

PACKAGE = Path(megascale.__file__).parent
FOLDERS = (PACKAGE, PACKAGE.parent / "tools")

MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "execfile"}

ALLOWED = {
    "megascale/convert/dcp.py": {"pickle"},  # `.metadata`; `_Unpickler` makes records, sizes and dtypes alone
    "megascale/operate/diagnose/hang/flight.py": {"pickle"},  # torch's dumps; `_SafeUnpickler` imports nothing
}


WORDS = re.compile("|".join([*MODULES, *(rf"\b{name}\b" for name in CALLS), "object", r"torch\.load", "yaml"]))
"""What the source of any finding has in it."""


def findings(source: str) -> Iterator[str]:
    """What runs code out of data in a module's source."""
    if not WORDS.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ({alias.name.split(".")[0] for alias in node.names} & MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from ({(node.module or "").split(".")[0]} & MODULES)
        elif isinstance(node, ast.Call):
            yield from _call_findings(node)
        if isinstance(node, ast.Attribute) and "object" in node.attr.split("_"):
            yield node.attr


def _call_findings(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if name in CALLS:
        yield name
    if name == "torch.load" and ast.unparse(keywords.get("weights_only", ast.Constant(None))) != "True":
        yield name
    if name.startswith("yaml.") and "safe" not in name:
        yield name
    if "allow_pickle" in keywords and ast.unparse(keywords["allow_pickle"]) != "False":
        yield "allow_pickle"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_nothing_unpickles(folder: Path) -> None:
    found = {}
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(PACKAGE.parent))
        if unexpected := set(findings(path.read_text())) - ALLOWED.get(name, set()):
            found[name] = unexpected
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "dist.broadcast_object_list(values)",
        "torch.distributed.all_gather_object(out, value)",
        "np.load(path, allow_pickle=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "exec(text)",
        "eval(text)",
        "import marshal",
    ],
)
def test_each_kind_is_found(source: str) -> None:
    assert list(findings(source))
