"""The file in which a rank leaves its ledger when the run ends, however it ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import _get_default_store

from megascale.comm import clock
from megascale.comm.shared import host_key
from megascale.core.events import RankEvents, file_name, write_events
from megascale.core.rank import Rank

if TYPE_CHECKING:
    from megascale.train.build import Run


class EventFile:
    """For a `with` block of every rank around the training: measures this rank's clock against rank 0's at its
    beginning and end, and leaves the events. Does nothing without a ledger, or with `observe.events` off.
    """

    def __init__(self, run: Run, rank: Rank) -> None:
        self._run = run
        self._rank = rank
        self._clock: list[tuple[float, float]] = []
        self._folder = run.config.folder / "events"
        self._wanted = run.config.observe.ledger and run.config.observe.events

    def __enter__(self) -> None:
        if self._rank.rank == 0:  # before the others can write: those of a run that had more ranks would stay
            with self._warned():
                for old in self._folder.glob(file_name("*")):
                    old.unlink()
        if self._wanted:
            self._measure_clock("start")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._wanted:
            return
        try:
            if kind is None:  # else others may be gone, who would have to take part
                self._measure_clock("end")
        finally:
            self.write()

    def _measure_clock(self, label: str) -> None:
        self._clock.append(clock.offset(self._run.mesh.world, _get_default_store(), label, host_key()))

    def write(self) -> None:
        """Write RUN/events/rank-N.jsonl."""
        mesh = self._run.mesh
        recorder = mesh.recorder
        with self._warned():
            events = RankEvents(
                rank=mesh.rank,
                world=mesh.topology.world,
                coord=mesh.coord._asdict(),
                host=self._rank.host,
                clock=tuple(self._clock),
                dropped=recorder.dropped,
                events=tuple(recorder.events()),
            )
            self._folder.mkdir(parents=True, exist_ok=True)
            write_events(self._folder / file_name(mesh.rank), events)

    @contextlib.contextmanager
    def _warned(self) -> Iterator[None]:
        """Neither a full disk nor a device that has failed, and has no times to tell, may change how a run ends."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            print(f"WARNING: {self._folder} cannot be written: {reason or error}", file=sys.stderr)
