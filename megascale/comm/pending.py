"""Communication under way."""

from __future__ import annotations

from typing import Protocol


class Pending(Protocol):
    """After `wait` the output of a communication may be read and its input written, on this rank's stream."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        return None


DONE: Pending = _Done()
"""Communication that needed none."""
