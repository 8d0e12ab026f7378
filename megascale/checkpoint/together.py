"""Work on a checkpoint that may fail on one rank: then every rank raises, with what went wrong there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megascale.checkpoint.manifest import DamagedError
from megascale.comm.group import Group
from megascale.core.errors import CheckpointError

T = TypeVar("T")


class OtherRankError(CheckpointError):
    """Another rank failed, and reports the error."""


KINDS = {kind.__name__: kind for kind in (CheckpointError, DamagedError, OtherRankError)}


def by_first(group: Group, work: Callable[[], Any], what: str) -> Any:
    """Do `work` on the group's first rank. Returns its result, which is of JSON, on every rank.

    Raises: CheckpointError on every rank if it does there
    """
    result: Any = None
    said = None
    if group.index == 0:
        try:
            result = work()
        except CheckpointError as error:
            said = _said(error)
    result, said = group.control.broadcast((result, said), what)
    if said is not None:
        kind, text, mend = said
        raise KINDS[kind](text, mend=mend)
    return result


def by_all(group: Group, work: Callable[[], T], what: str) -> T:
    """Do `work` on every rank. Returns this rank's result once all have theirs.

    Raises: on every rank the CheckpointError of the lowest rank that knows what went wrong
    """
    result: list[T] = []
    problem: Exception | None = None
    try:
        result.append(work())
    except Exception as error:  # whatever it is, the others wait
        problem = error
    everyone = group.control.gather(None if problem is None else _said(problem), what)
    failed = [(said[0] == OtherRankError.__name__, rank, said) for rank, said in enumerate(everyone) if said]
    if failed:
        _, rank, (kind, text, mend) = min(failed)
        raise KINDS[kind](f"rank {rank}: {text}", mend=mend) from problem
    return result[0]


def _said(error: Exception) -> tuple[str, str, str]:
    """Kind, text and remedy."""
    if not isinstance(error, CheckpointError):
        return CheckpointError.__name__, f"{type(error).__name__}: {error}", ""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS)
    return kind, error.what, error.mend
