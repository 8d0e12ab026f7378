"""Granularities are words by which tables name recipes: what code asks of a recipe are facts and quantizers."""

from __future__ import annotations

import re
from pathlib import Path

import megascale

COMPARED = re.compile(r"""granularity["')\]]*\s*(==|!=|in\b|not in\b)|(==|!=|in|not in)\s*[\w.\[\]"']*granularity\b""")
MAY = {"catalog/backends.py"}  # its cards list the words that a backend knows


def test_nothing_compares_granularities() -> None:
    root = Path(megascale.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py") if str(path.relative_to(root)) not in MAY
        for line in path.read_text().splitlines() if COMPARED.search(line) and "recompute" not in line
    ]  # fmt: skip
    assert found == []


def test_the_pattern_finds_comparisons() -> None:
    lines = ('if facts["granularity"] == "row":', 'facts["granularity"] in ("row", "block")', "x != sizes.granularity")
    assert all(map(COMPARED.search, lines))
