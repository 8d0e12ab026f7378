"""Errors on one rank, raised by all ranks: a rank that raised alone would leave the rest waiting in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megascale.checkpoint.format.manifest import DamagedError
from megascale.comm.group import Group
from megascale.core.errors import CheckpointError

T = TypeVar("T")


class OtherRankError(CheckpointError):
    """Another rank has failed. What it reports itself is the cause."""


ERROR_TYPES = {kind.__name__: kind for kind in (CheckpointError, DamagedError, OtherRankError)}


def on_first_rank(group: Group, work: Callable[[], Any], label: str) -> Any:
    """Call `work` on the group's first rank, and return its result (JSON) on every rank.

    Raises: on every rank the CheckpointError of the first
    """
    result: Any = None
    failure = None
    if group.index == 0:
        try:
            result = work()
        except CheckpointError as error:
            failure = _describe_error(error)
    result, failure = group.control.broadcast((result, failure), label)
    if failure is not None:
        kind, text, hint = failure
        raise ERROR_TYPES[kind](text, hint=hint)
    return result


def on_all_ranks(group: Group, work: Callable[[], T], label: str) -> T:
    """Call `work` on every rank, and return this rank's result once all ranks have succeeded.

    Raises: on every rank the CheckpointError of the lowest rank that knows the cause
    """
    result: list[T] = []
    problem: Exception | None = None
    try:
        result.append(work())
    except Exception as error:  # any error: the other ranks wait in the all-gather below
        problem = error
    failures = group.control.all_gather(None if problem is None else _describe_error(problem), label)
    failed = [
        (failure[0] == OtherRankError.__name__, rank, failure) for rank, failure in enumerate(failures) if failure
    ]
    if failed:
        _, rank, (kind, text, hint) = min(failed)
        raise ERROR_TYPES[kind](f"rank {rank}: {text}", hint=hint) from problem
    return result[0]


def _describe_error(error: Exception) -> tuple[str, str, str]:
    if not isinstance(error, CheckpointError):
        return CheckpointError.__name__, f"{type(error).__name__}: {error}", ""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERROR_TYPES)
    return kind, error.message, error.hint
