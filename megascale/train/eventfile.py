"""The file in which a rank leaves its ledger when the run ends, however it ends."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import _get_default_store

from megascale.comm import clock
from megascale.comm.shared import host_key
from megascale.core.events import RankEvents, file_name, write_events
from megascale.core.rank import Rank

if TYPE_CHECKING:
    from megascale.train.build import Run


class EventFile:
    """Measures this rank's clock against rank 0's, and writes its events. Every rank makes one at the start."""

    def __init__(self, run: Run, rank: Rank) -> None:
        self._run = run
        self._rank = rank
        self._clock: list[tuple[float, float]] = []
        self._folder = run.config.folder / "events"
        if rank.rank == 0:  # before the others can write: those of a run that had more ranks would stay
            for old in self._folder.glob(file_name("*")):
                old.unlink()
        self.measure_clock("start")

    def measure_clock(self, label: str) -> None:
        """Every rank must come here."""
        self._clock.append(clock.offset(self._run.mesh.world, _get_default_store(), label, host_key()))

    def write(self) -> None:
        """Write RUN/events/rank-N.jsonl. A full disk must not change how a run ends."""
        mesh, folder = self._run.mesh, self._folder
        recorder = mesh.recorder
        events = RankEvents(
            rank=mesh.rank,
            world=mesh.topology.world,
            coord=mesh.coord._asdict(),
            host=self._rank.host,
            clock=tuple(self._clock),
            dropped=recorder.dropped,
            events=tuple(recorder.events()),
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_events(folder / file_name(mesh.rank), events)
        except OSError as error:
            print(f"WARNING: {folder} cannot be written: {error.strerror or error}", file=sys.stderr)
