"""Statuses, verdicts, classes and messages in the pages for operators are those of the program."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from megascale.catalog.checks import CHECKS
from megascale.core.errors import Exit
from megascale.operate.diagnose.hang.hang import VerdictKind
from megascale.operate.driver.incidents import IncidentClass
from megascale.operate.health.node_verdicts import Kind

ROOT = Path(__file__).parents[2]
VALUE = re.compile(r"\.\.\.|\b(?!CRC)[A-Z]+\b|\d+(?:\.\d+)?|s3://|\bfrom\b")
"""Places of a message in which the program fills in a value."""

FEWEST_LETTERS = 8  # of a part of a message that is looked for


def table(page: str, first: str) -> list[str]:
    """Return the first column of the table whose first heading is `first`."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(line.split("|")[1].strip())
    return rows


def names(cells: list[str]) -> set[str]:
    """Return the names in cells, with or without quotes."""
    return {name.strip("` ") for cell in cells for name in cell.split(",")}


def test_exit_statuses() -> None:
    assert {int(cell) for cell in table("troubleshooting.md", "status") if cell.isdigit()} == set(map(int, Exit))


def test_verdicts_on_hangs() -> None:
    assert names(table("troubleshooting.md", "verdict")) == set(get_args(VerdictKind))


def test_classes_of_incidents() -> None:
    assert names(table("fault-tolerance.md", "class")) == set(get_args(IncidentClass))


def test_checks_of_nodes_and_their_verdicts() -> None:
    assert names(table("node-checks.md", "check")) == set(CHECKS.cards)
    assert names(table("node-checks.md", "verdict")) == set(get_args(Kind))


@cache
def program_text() -> str:
    """Return all string constants of the package, and the parts of f-strings."""
    texts = []
    for path in (ROOT / "megascale").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        texts += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(texts)


MESSAGES = [
    quoted
    for page, first in (
        ("checkpointing.md", "the run says"),
        ("troubleshooting.md", "at the start"),
        ("troubleshooting.md", "the run or its loss"),
    )
    for cell in table(page, first)
    for quoted in re.findall(r"`([^`]+)`", cell)
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_printed_by_the_program(message: str) -> None:
    for part in VALUE.split(message):
        words = part.strip(" :,;()")
        assert len(words) < FEWEST_LETTERS or words in program_text() or words in OF_SYSTEM, words


OF_SYSTEM = ("No space left on device",)
"""Parts of messages that the operating system words."""
