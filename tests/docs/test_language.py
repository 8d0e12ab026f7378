"""Docstrings, comments, messages and pages are in the field's words: subject first, nouns rather than pronouns."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from words import PRONOUNS, prose_words, sentences

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megascale"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MODULES = sorted(PACKAGE.rglob("*.py"))
WINGS = ("operate", "plan")
"""Folders of rooms."""

ROOMS = sorted(
    path.parent.relative_to(PACKAGE).as_posix()
    for path in [
        *PACKAGE.glob("*/__init__.py"),
        *(file for wing in WINGS for file in PACKAGE.glob(f"{wing}/*/__init__.py")),
    ]
)

MOST_PRONOUNS = 0.06
"""Share of a room's docstring words. torchtitan, nanochat, OLMo-core and picotron have 0.03 to 0.05."""

MOST_WORDS = 30
"""Words of a page's mean sentence."""

NO_SUBJECT = re.compile(r"(Of|What|Whether|Those|The same|Likewise|And|Which|Who|As before|None of|But|Nor|Or)\b")

FOREIGN = {
    r"(?<!dot )(?<!inner )(?<!cross )(?<!itertools\.)\bproducts?\b": "GEMM or matmul",
    r"\b(formed|computed|computes|gathered|form) again\b": "recompute, or all-gather for wgrad",
    r"\beight[- ]bits?\b": "FP8",
    r"(?<!observe\.)\bledgers?\b": "event log",
    r"\bmends?\b": "hint, or fix",
    r"\bspoilt\b": "not finite",
    r"\bso many\b": "a number, or its name",
    r"\btravel(s|led|ling)? (behind|under)\b": "overlap with",
    r"\bmakes? room\b": "allocate",
}
"""Words that are not the field's, and what stands in their place."""


@cache
def docstrings(path: Path) -> tuple[str, ...]:
    """The docstrings of a module, its classes, functions, constants and fields."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found += [text] if (text := ast.get_docstring(node)) else []
            for before, after in pairwise(node.body):
                if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    value = after.value
                    found += [value.value] if isinstance(value, ast.Constant) and isinstance(value.value, str) else []
    return tuple(found)


@cache
def strings_and_comments(path: Path) -> tuple[tuple[int, str], ...]:
    """The lines of a module that are prose: comments, docstrings and messages."""
    found = []
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type in kinds:
            found += [(token.start[0] + at, line) for at, line in enumerate(token.string.splitlines())]
    return tuple(found)


def room_of(path: Path) -> str:
    """The folder of the package that a module stands in."""
    folders = path.relative_to(PACKAGE).parts[:-1]
    return "/".join(folders[: 2 if folders[:1] and folders[0] in WINGS else 1])


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_their_subject(room: str) -> None:
    mine = [(path, text) for path in MODULES if room_of(path) == room for text in docstrings(path)]
    assert not [f"{path.relative_to(ROOT)}: {text[:60]}" for path, text in mine if NO_SUBJECT.match(text)]


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_use_nouns(room: str) -> None:
    found = [
        word.lower()
        for path in MODULES
        if room_of(path) == room
        for text in docstrings(path)
        for word in prose_words(text)
    ]
    share = sum(word in PRONOUNS for word in found) / max(1, len(found))
    assert share <= MOST_PRONOUNS, f"{share:.1%}: {Counter(word for word in found if word in PRONOUNS).most_common(5)}"


@pytest.mark.parametrize("room", ROOMS)
def test_the_words_are_the_field_s(room: str) -> None:
    found = []
    for path in MODULES:
        for number, line in strings_and_comments(path) if room_of(path) == room else ():
            found += [f"{path.relative_to(ROOT)}:{number}: {line.strip()[:70]} -> {ours}" for ours in foreign(line)]
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_s_words_are_the_field_s(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    assert not [f"{number}: {line[:70]} -> {ours}" for number, line in lines for ours in foreign(line)]


def foreign(line: str) -> list[str]:
    """What should stand in place of a line's words."""
    prose = re.sub(r"`[^`]*`", " ", line)
    return [ours for pattern, ours in FOREIGN.items() if re.search(pattern, prose, re.IGNORECASE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    lengths = [len(prose_words(sentence)) for sentence in sentences(page.read_text(encoding="utf-8"))]
    assert sum(lengths) <= MOST_WORDS * max(1, len(lengths))


def test_a_name_means_one_thing() -> None:
    """Two modules or public classes share a name only for a reason that is listed."""
    modules, classes = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for path in MODULES:
        modules[path.name].add(room_of(path))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].add(path.relative_to(PACKAGE).as_posix())
    twice = {name: rooms for name, rooms in {**modules, **classes}.items() if len(rooms) > 1}
    assert twice.keys() == SHARED.keys(), {name: twice.get(name) for name in twice.keys() ^ SHARED.keys()}


SHARED = {
    "agent.py": "cli: the command; operate/node: the agent that it runs",
    "__init__.py": "every folder has one",
    "backends.py": "catalog: the cards; config: the section that selects among them",
    "events.py": "cli: the command that queries the event store; record: events as values",
    "check.py": "cli: the command; schedule: the proofs",
    "data.py": "cli: the command; config: the section",
    "diagnose.py": "cli: the command that says whether a run hangs; operate/health: which node or link is bad",
    "driver.py": "cli: the hidden command; operate/driver: the driver of a job",
    "launch.py": "cli: the command; config: the section",
    "plan.py": "cli: the command; plan/search: the plan that it prints",
    "sites.py": "cli: the command that serves the meeting point; config: the section",
    "run.py": "config: the configuration; train: the objects of a run on a rank",
    "watch.py": "cli: the command; operate/driver: the progress of an attempt",
    "train.py": "cli: the command; config: the section",
    "device.py": "the device of this process; bench: checks of a node's devices",
    "AgentEnd": "operate/channel: the agent's end of a connection; scheduler: the end of its process",
    "attention.py": "layout: the part of a block; model: its module",
    "linear_attention.py": "layout: the part of a block; ops: the operation",
    "finding.py": "config: a broken rule; operate/diagnose: a cause of lost time",
    "step_totals.py": "plan/account: their names; train: their sums",
    "timeline.py": "operate/show: of a run; plan/search: of a plan",
    "Part": "layout: of a block; operate/diagnose: of a step's time",
    "Finding": "config: a broken rule; operate/driver: a fault, its culprit; operate/diagnose: a cause of lost time",
    "Node": "operate/driver: a node of a job; plan/simulate: the section [node] of a hardware profile",
    "Action": "operate/driver: what the driver does about an incident; schedule: an action of a pipeline schedule",
    "Device": "device.py: the device of this process; plan/simulate: the section [device] of a hardware profile",
    "Stage": "operate/driver: a stage of a job; model: a pipeline stage",
}
"""Names of two modules or classes, and why nobody takes one for the other."""


def test_the_rules_find_what_they_look_for() -> None:
    assert NO_SUBJECT.match("Of each rank its bytes.") and NO_SUBJECT.match("What travels.")
    assert foreign("the product of x and w") == ["GEMM or matmul"] and not foreign("the dot product, `product`")
    assert foreign("see the mend")
    assert prose_words("a `b` c-d") == ["a", "c-d"]
