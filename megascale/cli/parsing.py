"""Parsers of commands: help with a description, an example and a page; errors in a line."""

from __future__ import annotations

import argparse
import re
import textwrap
from typing import NoReturn

from megascale.core.errors import Exit
from megascale.core.registry import closest_name

UNBROKEN = re.compile(r"\((?:default|such as)[^()]*\)")


class CommandParser(argparse.ArgumentParser):
    """The parser of a command or a tool. `prog`: the words that start it; `about`: text, of a line or of paragraphs;
    `example`: a command line; `page`: of docs/.
    """

    def __init__(self, prog: str, about: str, example: str = "", page: str = "") -> None:
        epilog = "\n\n".join([f"example:\n  {example}"] * bool(example) + [f"page: {page}"] * bool(page))
        super().__init__(prog=prog, description=about, epilog=epilog, formatter_class=HelpFormatter, allow_abbrev=False)
        self._positionals.title = "arguments"

    def closest_option(self, word: str) -> str:
        """Return the hint for a misspelled option, which is never --help; "" if no option is close."""
        names = {name.lstrip("-"): name for name in self._option_string_actions if name not in ("-h", "--help")}
        close = closest_name(word.partition("=")[0].lstrip("-"), names)
        return f"did you mean '{names[close]}'?" if close else ""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong in a line, with what to do, and end with status 2."""
        hint = "" if "  -> " in message else f"  -> see {self.prog} --help"
        self.exit(Exit.CONFIG, f"{self.prog}: {message}{hint}\n")


class HelpFormatter(argparse.HelpFormatter):
    """Keeps indented lines as they are, wraps other lines one by one, and breaks no default and no word."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.sub(r"(?<=\S)\n(?=[^\s])", " ", text.strip()).splitlines()
        lines = [line if line.startswith("  ") else textwrap.fill(line, width) for line in paragraphs]
        return textwrap.indent("\n".join(lines), indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        def join(found: re.Match[str]) -> str:
            return found[0].replace(" ", "\0") if len(found[0]) <= width else found[0]

        joined = UNBROKEN.sub(join, " ".join(text.split()))
        lines = textwrap.wrap(joined, width, break_long_words=False, break_on_hyphens=False)
        return [line.replace("\0", " ") for line in lines]
