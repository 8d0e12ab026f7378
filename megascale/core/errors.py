"""Errors for users: what is wrong, where, the value found, and a hint.

Every class carries the exit status of the process. A `MegascaleError` is printed without a traceback; any other
exception is a bug in megascale and keeps its traceback.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Exit(enum.IntEnum):
    """Exit statuses of every command, for schedulers and the fault driver."""

    OK = 0
    UNCLASSIFIED = 1
    CONFIG = 2
    DATA = 3
    CHECKPOINT = 4
    DO_NOT_REQUEUE = 93  # a restart would fail in the same way
    INTERRUPTED = 130  # Ctrl-C with nothing to save
    STOPPED = 143  # stopped by a signal, after the state was saved if the run saves checkpoints


class MegascaleError(Exception):
    """An error that a user can fix. `hint`: one sentence or command that says how."""

    exit_status = Exit.UNCLASSIFIED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}  -> {self.hint}" if self.hint else self.message


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration. `where` is `file:line`, `command line` or the source of a default."""

    where: str
    key: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        line = f"{self.where}  {self.key}: {self.message}" if self.key else f"{self.where}  {self.message}"
        return (f"{line}  -> {self.hint}" if self.hint else line).replace("\n", "\\n")  # one line, whatever the value


class ConfigError(MegascaleError):
    """All mistakes in a configuration, reported at once."""

    exit_status = Exit.CONFIG

    def __init__(self, problems: Sequence[Problem]) -> None:
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([*map(str, problems), count]))
        self.problems = tuple(problems)


class HostsDisagreeError(MegascaleError):
    """The ranks of a job were started with different code, configurations or environments; raised on every rank."""

    exit_status = Exit.CONFIG


class DataError(MegascaleError):
    """A corpus, tokenizer or token dataset is unusable."""

    exit_status = Exit.DATA


class NoLossTokensError(DataError):
    """No label of a global batch counts in the loss; raised on every rank."""


class CheckpointError(MegascaleError):
    """A checkpoint cannot be written, or is incomplete or corrupt."""

    exit_status = Exit.CHECKPOINT


class LostPeerError(MegascaleError, RuntimeError):
    """A communication failed because another rank has ended or does not answer; a RuntimeError like torch's own.

    `peers`: the global ranks that it needed, as far as they are known.
    """

    def __init__(self, message: str, *, peers: Sequence[int] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.peers = tuple(peers)


class CorruptStateError(MegascaleError):
    """Weights, loss or gradients are wrong on the `ranks` named, as far as they are known; raised on every rank."""

    exit_status = Exit.DO_NOT_REQUEUE

    def __init__(self, message: str, *, ranks: Sequence[int] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.ranks = tuple(ranks)


class DivergenceError(CorruptStateError):
    """The loss, a gradient or a weight is not finite: a restart would fail in the same step."""


class ReplicasDifferError(CorruptStateError):
    """Replicas of a parameter have drifted apart: a restart from the same state would train on two models."""
