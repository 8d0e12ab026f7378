"""The event file of a rank, written when the run ends, also on an error; and the beginning of its event ring, which
others read meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import _get_default_store

from megascale.catalog.accelerators import Peak
from megascale.comm import clock
from megascale.comm.shared_memory import host_key
from megascale.core.env_numbers import whole_number
from megascale.core.errors import CheckpointError
from megascale.core.events import RankEvents, event_file_name, write_events
from megascale.core.flight_record import ATTEMPT_VARIABLE
from megascale.core.rank import Rank
from megascale.core.run_folder import check_known
from megascale.core.storage import Location
from megascale.operate.store.attempts import begin_attempt

if TYPE_CHECKING:
    from megascale.train.run import Run


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

    @property
    def clock_offset_s(self) -> float:
        """Seconds by which rank 0's clock was ahead when last measured."""
        return self._clock[-1][1] if self._clock else 0.0

    def __enter__(self) -> EventFile:
        if self._rank.rank == 0:  # before any rank writes: files of an earlier run with more ranks would stay
            with self._warn_on_error():
                for old in self._folder.glob(event_file_name("*")):
                    old.unlink()
        if self._enabled or self._run.config.observe.store:
            self._measure_clock("start")
        return self

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
            check_known(self._run.config.folder)
            self._folder.mkdir(exist_ok=True)  # not its parents: a lost run folder is not made anew
            write_events(self._folder / event_file_name(mesh.rank), events)

    @contextlib.contextmanager
    def _warn_on_error(self) -> Iterator[None]:
        """Turn errors into a warning: a full disk or a failed device must not change the exit status."""
        try:
            yield
        except (OSError, RuntimeError, CheckpointError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            print(f"WARNING: {self._folder} cannot be written: {reason or error}", file=sys.stderr)


def begin_ring(run: Run, clock_offset_s: float, peak: Peak | None) -> None:
    """Begin an attempt in the event store, and let collectors store this rank's events from now on. A collective of all
    ranks. Rank 0 decides the attempt's number and says what its clock shows; `clock_offset_s`: by which it is ahead.
    """
    if not run.config.observe.store:
        return
    begun = run.mesh.world.control.broadcast(_begin_store(run) if run.mesh.rank == 0 else None, "event store")
    if (ring := run.mesh.recorder.ring) is not None:
        epoch_ns = begun["epoch_ns"] + round(clock_offset_s * 1e9)
        ring.set_ready(begun["attempt"], epoch_ns, run.mesh.coord._asdict(), peak.flops if peak else 0)


def _begin_store(run: Run) -> dict[str, int]:
    """Return the attempt's number, and ns since 1970 at the zero of this host's monotonic clock."""
    attempt, epoch_ns = whole_number(os.environ, ATTEMPT_VARIABLE), time.time_ns() - time.monotonic_ns()
    store = Location(run.config.store_folder, retry_s=0)
    try:
        attempt = begin_attempt(store, attempt, new_run=attempt == 0 and run.progress.step == 0)
    except OSError as error:
        print(f"WARNING: the event store {store} cannot be used: {error.strerror or error}", file=sys.stderr)
    return {"attempt": attempt, "epoch_ns": epoch_ns}
