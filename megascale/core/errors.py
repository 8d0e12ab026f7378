"""Errors that a person reads: what is wrong, where, what was found, how to mend it.

Each class carries the exit status of the process that it ends. A `MegascaleError` is printed without a traceback;
anything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Exit(enum.IntEnum):
    """Exit statuses of every command; schedulers and the fault driver read them."""

    OK = 0
    UNCLASSIFIED = 1
    CONFIG = 2
    DATA = 3
    CHECKPOINT = 4
    DO_NOT_REQUEUE = 93  # running again would end the same way
    INTERRUPTED = 130  # Ctrl-C, and there was nothing to save
    STOPPED = 143  # a signal asked, the state was saved


class MegascaleError(Exception):
    """Something that a user can mend. `mend` says how, in one sentence or command."""

    exit_status = Exit.UNCLASSIFIED

    def __init__(self, what: str, *, mend: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.what}  -> {self.mend}" if self.mend else self.what


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration. `where` is `file:line`, `command line` or the source of a default."""

    where: str
    key: str
    found: str
    mend: str = ""

    def __str__(self) -> str:
        line = f"{self.where}  {self.key}: {self.found}" if self.key else f"{self.where}  {self.found}"
        return (f"{line}  -> {self.mend}" if self.mend else line).replace("\n", "\\n")  # one line, whatever was found


class ConfigError(MegascaleError):
    """Every mistake found in a configuration, at once."""

    exit_status = Exit.CONFIG

    def __init__(self, problems: Sequence[Problem]) -> None:
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}; nothing was launched"
        super().__init__("\n".join([*map(str, problems), count]))
        self.problems = tuple(problems)


class DataError(MegascaleError):
    """A corpus, tokenizer or token dataset that cannot be used."""

    exit_status = Exit.DATA


class UncountedError(DataError):
    """A batch of which no label counts in the loss; every rank raises it."""


class CheckpointError(MegascaleError):
    """A checkpoint that cannot be written, or cannot be trusted."""

    exit_status = Exit.CHECKPOINT


class DivergenceError(MegascaleError):
    """The loss or a gradient is not finite: the same step would end the same way again."""

    exit_status = Exit.DO_NOT_REQUEUE
