"""Event rings of ranks that this process plays, for tests of their collection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megascale.core.event_ring import (
    NO_COMMUNICATION,
    EventRing,
    RingIdentity,
    StepRow,
    event_ring_path,
    open_event_ring,
)
from megascale.core.flight_layout import Phase
from megascale.core.flight_writer import FlightIdentity, FlightRecordWriter, open_flight_record
from megascale.core.label import Label
from megascale.operate.store.settings import StoreSettings

EPOCH_NS = 1_700_000_000 * 10**9


class PlayedRank:
    """A rank with a flight record and an event ring in `folder`, whose store is `url`."""

    def __init__(self, folder: Path, rank: int, url: Path | str, *, ready: bool = True, **settings: Any) -> None:
        self.rank = rank
        self.path = folder / f"rank-{rank}.flight"
        self.flight: FlightRecordWriter = open_flight_record(FlightIdentity("a run", rank, 2), self.path)
        self.flight.set_phase(Phase.STEP)
        note = asdict(StoreSettings(str(url), "node-a", **settings))
        self.ring: EventRing = open_event_ring(event_ring_path(self.path), RingIdentity(rank, 2, 0, note), 4096)
        if ready:
            self.begin()

    def begin(self, attempt: int = 0, coord: Mapping[str, int] | None = None) -> None:
        """Begin to train."""
        self.ring.set_ready(attempt, EPOCH_NS, coord or {"tp": self.rank}, 1e12)

    def compute(self, step: int, name: str, start: float, end: float, exposed: float = 0.0, chunk: int = 0) -> None:
        times = (start, start, end, exposed)
        self.ring.write_event("compute", name, Label(), (step, chunk, 1), NO_COMMUNICATION, times)

    def communicate(self, step: int, sequence: int, start: float, end: float, nbytes: int = 8) -> None:
        label, times = Label("qkv", 3, direction="forward"), (start, start, end, 0.0)
        self.ring.write_event("tp", "all_gather", label, (step, 0, 1), ("tp", sequence, -1, nbytes), times)

    def end_step(self, step: int, start: float = 1.0, end: float = 2.0, tags: int = 0, loss: float = 2.5) -> None:
        self.ring.write_step(StepRow(step, start, end, end - start - 0.25, tags, loss, 1.5, 4096, 1e15, 1 << 30))
