"""Logs of ranks that this process plays, for tests of their collection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megascale.operate.store.settings import StoreSettings
from megascale.record.label import Label
from megascale.record.layout import Phase
from megascale.record.log import LogIdentity, RankLog, StepRow, open_log

EPOCH_NS = 1_700_000_000 * 10**9

Times = tuple[float, float, float, float]
"""Issue, start, end, and exposed seconds of an event."""


class PlayedRank:
    """A rank with a log in `folder`, whose store is `url`."""

    def __init__(self, folder: Path, rank: int, url: Path | str, *, ready: bool = True, **settings: Any) -> None:
        self.rank = rank
        self.path = folder / f"rank-{rank}.flight"
        note = asdict(StoreSettings(str(url), "node-a", **settings))
        self.log: RankLog = open_log(LogIdentity("a run", rank, 2, note=note), self.path, 4096)
        self.log.set_phase(Phase.STEP)
        if ready:
            self.begin()

    def begin(self, attempt: int = 0, coord: Mapping[str, int] | None = None) -> None:
        """Begin to train."""
        self.log.set_ready(attempt, EPOCH_NS, coord or {"tp": self.rank}, 1e12)

    def act(self, name: str, place: tuple[int, int, int], times: Times) -> None:
        self.log.write_times(self.log.begin_action(name, place), *times)

    def compute(self, step: int, name: str, start: float, end: float, exposed: float = 0.0, chunk: int = 0) -> None:
        self.act(name, (step, chunk, 1), (start, start, end, exposed))

    def communicate(self, step: int, sequence: int, start: float, end: float, nbytes: int = 8) -> None:
        label, times = Label("qkv", 3, direction="forward"), (start, start, end, 0.0)
        handle = self.log.enter("tp", "all_gather", label, nbytes, -1, (step, 0, 1), stored=("tp", sequence))
        self.log.write_times(handle[2], *times)

    def end_step(self, step: int, start: float = 1.0, end: float = 2.0, tags: int = 0, loss: float = 2.5) -> None:
        self.log.write_step(StepRow(start, end, end - start - 0.25, 4096, 1 << 30, 1e15, loss, 1.5, step, tags))
