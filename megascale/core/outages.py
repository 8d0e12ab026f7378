"""Outages: parts of a run that fail for a while, to tell of the first failure and of the recovery alone."""

from __future__ import annotations


class Outages:
    """The failures of each part since it last worked."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}

    def begins(self, part: str) -> bool:
        """Count a failure; return True for the first since the part last worked."""
        self._failures[part] = self._failures.get(part, 0) + 1
        return self._failures[part] == 1

    def ends(self, part: str) -> int:
        """Record that the part works; return the number of failures before, 0 if it worked all along."""
        return self._failures.pop(part, 0)
