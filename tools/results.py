#!/usr/bin/env python3
"""Run a command and write its output as a page of docs/results/, with command, commit, machine and date.

`results.py NAME --title TITLE --measured SENTENCE -- COMMAND...` writes docs/results/NAME.md. `results.py NAME` runs
the commands that the page names, and replaces its tables, commit, machine and date.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import megascale
from megascale.core.files import write_text
from megascale.core.process import usable_cores

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"

ELSEWHERE = "in the table|not recorded"
"""Words in place of a command or commit: rows of the tables have their own, or the measurement left none."""

ROWS = ("command", "commit", "machine", "date")
"""Rows of the first table of a page of results."""


@dataclass(frozen=True)
class Heading:
    """The beginning of a page of results: its title, a sentence that says what was measured, and its commands."""

    title: str
    measured: str
    commands: tuple[str, ...]


def write_page(name: str, title: str, measured: str, parts: Sequence[str], commands: Sequence[str] = ()) -> Path:
    """Write a page of results atomically; return its path. `parts`: tables and sentences, in Markdown; `commands`: of
    the measurement, by default this process's.
    """
    page = RESULTS / f"{name}.md"
    page.parent.mkdir(exist_ok=True)
    values = (", ".join(f"`{command}`" for command in commands or [own_command()]), commit(), machine(), today())
    rows = [f"| {row} | {value} |" for row, value in zip(ROWS, values, strict=True)]
    text = "\n\n".join([f"# {title}", measured, "\n".join(["| | |", "|---|---|", *rows]), *map(str.strip, parts)])
    write_text(page, text + "\n")
    return page


def fill(page: Path, name: str, content: str) -> None:
    """Write the region `name` of a page atomically, and on a page of results commit, machine and date of now.

    Raises: ValueError if the page lacks the region's markers
    """
    text = filled(page.read_text(encoding="utf-8") if page.is_file() else "", name, content, page)
    if page.parent == RESULTS:
        for row, value in (("commit", commit()), ("machine", machine()), ("date", today())):
            text = re.sub(rf"^\| {row} \|.*\|$", f"| {row} | {value} |", text, count=1, flags=re.MULTILINE)
    write_text(page, text)


def check_region(page: Path, name: str) -> None:
    """Check that a page has a region, before a long measurement.

    Raises: ValueError if the page lacks the markers
    """
    filled(page.read_text(encoding="utf-8") if page.is_file() else "", name, "", page)


def filled(text: str, name: str, content: str, page: Path) -> str:
    """Return the text of a page with content between the markers of a region.

    Raises: ValueError if the page lacks the markers
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page}: no lines {begin} and {end}: add both lines where the table should be")
    return f"{before}{begin}\n{content}\n{end}{after}"


def pipes(*rows: Sequence[str]) -> list[str]:
    """Format a Markdown table; the first row is its head."""
    head, *body = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]


def own_command() -> str:
    """Return this process's command line, relative to the repository."""
    script = os.path.relpath(Path(sys.argv[0]).resolve(), ROOT)
    return shlex.join(["python", script, *sys.argv[1:]])


def commit() -> str:
    """Return the commit of the working tree, and whether the tree has other changes; the version of an sdist."""
    if not (ROOT / ".git").exists():
        return f"release {megascale.__version__}"

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = [line for line in git("status", "--porcelain").splitlines() if "docs/" not in line]
    return git("rev-parse", "--short=8", "HEAD") + (" with changes" if changed else "")


def machine() -> str:
    """Describe this machine: its GPUs, or its processor and cores; and torch's version."""
    import torch

    from megascale.device import detect_device, gpu_count

    device = detect_device()
    parts = f"{usable_cores()} cores" if device.is_cpu else f"{gpu_count()} GPUs"
    return f"{device.name}, {parts}, torch {torch.__version__}"


def today() -> str:
    """Return the date in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def read_heading(page: Path) -> Heading:
    """Read the beginning of a page of results.

    Raises: ValueError if a part is missing
    """
    text = page.read_text(encoding="utf-8")
    found = re.match(r"# (.+)\n\n(.+?)\n\n\| *\| *\|\n\|[- |:]+\|\n((?:\|.*\|\n)+)", text, re.DOTALL)
    if not found:
        raise ValueError(f"{page.name}: no title, sentence and table of {', '.join(ROWS)} at its beginning")
    rows = dict(re.findall(r"^\| *(.+?) *\| *(.*?) *\|$", found[3], re.MULTILINE))
    wanted = {
        "command": rf"`[^`]+`|{ELSEWHERE}",
        "commit": rf"\b[0-9a-f]{{7,}}\b|release \d|{ELSEWHERE}",
        "machine": r"\w",
        "date": r"\b20\d\d-\d\d-\d\d\b",
    }
    if bad := [row for row, pattern in wanted.items() if not re.search(pattern, rows.get(row, ""))]:
        raise ValueError(f"{page.name}: no {', '.join(bad)} in its first table")
    return Heading(found[1], found[2].replace("\n", " "), tuple(re.findall(r"`([^`]+)`", rows["command"])))


def output(command: str) -> str:
    """Run a command in the repository and return its output as Markdown: a block of text if there is no table."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    text = subprocess.run(shlex.split(command), cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    return text if re.search(r"^\|[-: |]+\|$", text, re.MULTILINE) else f"```\n{text.strip()}\n```"


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the page, docs/results/NAME.md")
    parser.add_argument("--title", help="of a new page")
    parser.add_argument("--measured", help="a sentence: what a new page measures")
    words, command = sys.argv[1:], list[str]()
    if "--" in words:
        words, command = words[: words.index("--")], words[words.index("--") + 1 :]
    options = parser.parse_args(words)
    try:
        if command:
            if not (options.title and options.measured):
                raise ValueError("a new page needs --title and --measured")
            heading = Heading(options.title, options.measured, (shlex.join(command),))
        else:
            heading = read_heading(page := RESULTS / f"{options.name}.md")
            if ": begin -->" in page.read_text(encoding="utf-8"):
                raise ValueError(f"{page.name}: its tables are filled in by the tool itself: {heading.commands}")
            if not heading.commands:
                raise ValueError(f"{options.name}: the page names no command")
        parts = [output(command) for command in heading.commands]
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 2
    print(write_page(options.name, heading.title, heading.measured, parts, heading.commands))
    return 0


if __name__ == "__main__":
    sys.exit(main())
