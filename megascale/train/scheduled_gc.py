"""Garbage collection at fixed steps, at the same time on all ranks.

Automatic collections hit ranks at different times, and every late rank delays the whole job. The paper names such
irregular collections as a cause of the decay of MFU over a run (section 6.3).
"""

from __future__ import annotations

import gc

COLLECT_EVERY = 100
"""Steps between collections."""


class ScheduledGC:
    """A context manager that replaces automatic collection by `collect_if_due`."""

    def __enter__(self) -> ScheduledGC:
        gc.collect()
        gc.freeze()  # the run's objects live to the end; later collections skip them
        gc.disable()
        return self

    def collect_if_due(self, step: int) -> None:
        """Collect every COLLECT_EVERY steps."""
        if step % COLLECT_EVERY == 0:
            gc.collect()

    def __exit__(self, *exc: object) -> None:
        gc.enable()
        gc.unfreeze()
