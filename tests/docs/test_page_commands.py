"""The commands of the pages, in blocks and in the text, are commands, with options that they have."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale.cli.command_table import command_of, gone_command
from megascale.cli.main import parse

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```(?:bash)?\n(.*?)```", re.DOTALL)
QUOTED = re.compile(r"`megascale ([^`]+)`")
ENDS = ("&", "|", ">", "<", "&&", "||", ";")
PROGRAM = ("megascale", ".venv/bin/megascale")


def command_lines(text: str) -> Iterator[list[str]]:
    """The words after `megascale` in the lines of blocks, also behind srun and torchrun."""
    for line in "\n".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True) if re.search(r"(?:^|[ /])megascale ", line) else []
        place = next((at for at, word in enumerate(words) if word in PROGRAM and words[at - 1] != "--systems"), None)
        if place is not None and not line.lstrip().startswith("$ "):
            yield list(itertools.takewhile(lambda word: word not in ENDS, words[place + 1 :]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_are_parsed(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page.read_text(encoding="utf-8")
    for words in command_lines(text):
        try:
            parse(words)
        except SystemExit as ended:
            assert not ended.code, f"megascale {shlex.join(words)}: {capsys.readouterr().err}"
    for quoted in QUOTED.findall(text):
        words = quoted.split()
        assert gone_command(words) is None and (command_of(words) or words[0].startswith("-")), quoted
