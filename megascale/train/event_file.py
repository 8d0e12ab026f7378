"""The event file of a rank, written when the run ends, also on an error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import _get_default_store

from megascale.comm import clock
from megascale.comm.shared_memory import host_key
from megascale.core.events import RankEvents, event_file_name, write_events
from megascale.core.rank import Rank

if TYPE_CHECKING:
    from megascale.train.build import Run


class EventFile:
    """A context manager for training on every rank: removes old event files, measures the offset to rank 0's clock at
    start and end, and writes the events. Without `observe.record` or `observe.events`, only old files are removed.
    """

    def __init__(self, run: Run, rank: Rank) -> None:
        self._run = run
        self._rank = rank
        self._clock: list[tuple[float, float]] = []
        self._folder = run.config.folder / "events"
        self._enabled = run.config.observe.record and run.config.observe.events

    def __enter__(self) -> None:
        if self._rank.rank == 0:  # before any rank writes: files of an earlier run with more ranks would stay
            with self._warn_on_error():
                for old in self._folder.glob(event_file_name("*")):
                    old.unlink()
        if self._enabled:
            self._measure_clock("start")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._enabled:
            return
        try:
            if kind is None:  # after an error, peers may be gone, and the measurement needs them
                self._measure_clock("end")
        finally:
            self.write()

    def _measure_clock(self, label: str) -> None:
        self._clock.append(clock.clock_offset(self._run.mesh.world, _get_default_store(), label, host_key()))

    def write(self) -> None:
        """Write RUN/events/rank-N.jsonl."""
        mesh = self._run.mesh
        recorder = mesh.recorder
        with self._warn_on_error():
            events = RankEvents(
                rank=mesh.rank,
                world=mesh.topology.world_size,
                coord=mesh.coord._asdict(),
                host=self._rank.host,
                clock=tuple(self._clock),
                dropped=recorder.dropped,
                events=tuple(recorder.events()),
            )
            self._folder.mkdir(parents=True, exist_ok=True)
            write_events(self._folder / event_file_name(mesh.rank), events)

    @contextlib.contextmanager
    def _warn_on_error(self) -> Iterator[None]:
        """Turn errors into a warning: a full disk or a failed device must not change the exit status."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            print(f"WARNING: {self._folder} cannot be written: {reason or error}", file=sys.stderr)
