"""Garbage collection at fixed steps, at the same time on all ranks.

Automatic collections hit ranks at different times, and every late rank delays the whole job. The paper names such
irregular collections as a cause of the decay of MFU over a run (section 6.3).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megascale.record.layout import Phase
from megascale.train.run import Hook

if TYPE_CHECKING:
    from megascale.train.run import Run, StepResult

COLLECT_EVERY = 100  # steps between collections


@contextlib.contextmanager
def without_automatic_gc() -> Iterator[None]:
    """Switch automatic collection off in a `with` block."""
    gc.collect()
    gc.freeze()  # the objects of now live to the end; collections in the block skip them
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class ScheduledGC(Hook):
    """Replaces automatic collection by a collection every COLLECT_EVERY steps."""

    def __init__(self) -> None:
        self._automatic_off = contextlib.ExitStack()

    def run_begins(self, run: Run) -> None:
        self._automatic_off.enter_context(without_automatic_gc())

    def step_ends(self, run: Run, result: StepResult) -> None:
        if run.progress.step % COLLECT_EVERY == 0:
            with run.mesh.recorder.log.phase(Phase.GC):
                gc.collect()

    def run_ends(self, run: Run) -> None:
        self._automatic_off.close()

    def run_fails(self, run: Run, error: BaseException) -> None:
        self._automatic_off.close()
