"""Garbage collection at chosen steps, on all ranks at once.

Collections that come when Python likes make ranks late one after the other, and each makes all others wait: the paper
traces the decay of MFU over a run to this (section 6.3).
"""

from __future__ import annotations

import gc

EVERY = 100
"""Steps between collections."""


class ScheduledCollection:
    """Turns automatic collection off while it is open."""

    def __enter__(self) -> ScheduledCollection:
        gc.collect()
        gc.freeze()  # what was built before the first step stays, and need not be looked through again
        gc.disable()
        return self

    def after(self, step: int) -> None:
        """Collect if it is time."""
        if step % EVERY == 0:
            gc.collect()

    def __exit__(self, *exc: object) -> None:
        gc.enable()
        gc.unfreeze()
