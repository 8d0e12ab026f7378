"""The files of flight records, and of the event rings beside them, on a host: who makes them, and who removes them.

- `flight_record_files`: for the ranks that a launcher starts
- `flight_record_of_rank`: for this process
- `read_flight_records`, `process_states`: from outside
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from megascale.core.env_numbers import whole_number
from megascale.core.event_ring import event_ring_path
from megascale.core.event_ring_reader import EventRingError, EventRingReader
from megascale.core.files import is_folder
from megascale.core.flight_reader import read_flight_record
from megascale.core.flight_record import (
    ATTEMPT_VARIABLE,
    FLIGHT_RECORD_VARIABLE,
    SHARED_MEMORY,
    SILENT_S,
    FlightRecord,
    FlightRecordError,
    flight_record_path,
    folder_key,
)
from megascale.core.flight_writer import FlightIdentity, FlightRecordWriter, open_flight_record
from megascale.core.process import cpu_seconds, process_exists, process_state
from megascale.core.rank import Rank

LOOK_S = 0.25
"""Seconds between two looks at the CPU time of a process."""


@contextlib.contextmanager
def flight_record_files(run: str, ranks: Iterable[int]) -> Iterator[dict[int, Path]]:
    """Yield paths for the records of ranks, and remove the files after the block. Files that ended ranks of a run of
    this name have left are removed first.
    """
    remove_left_records(run)
    start_ns = time.time_ns()
    paths = {rank: flight_record_path(run, start_ns, rank) for rank in ranks}
    try:
        yield paths
    finally:
        for path in paths.values():
            remove_record(path)


@contextlib.contextmanager
def flight_record_of_rank(
    folder: Path, rank: Rank, env: Mapping[str, str] = os.environ
) -> Iterator[FlightRecordWriter]:
    """Begin this process's record, in the file that its launcher or agent names in the environment. `folder`: of the
    run.

    Under another launcher (torchrun, srun) the rank names the file itself, removes it at its end in order, and leaves
    it after an error, for others to read; the next rank of the run on this host removes it. The event ring stays for
    its collector in any case.
    """
    named = env.get(FLIGHT_RECORD_VARIABLE)
    path = Path(named) if named else None
    if path is None and is_folder(SHARED_MEMORY, optional=True):
        remove_left_records(folder.name)
        path = flight_record_path(folder.name, time.time_ns(), rank.rank)
    attempt = whole_number(env, ATTEMPT_VARIABLE)
    identity = FlightIdentity(folder.name, rank.rank, rank.world_size, attempt, folder_key(folder))
    yield open_flight_record(identity, path)
    if path is not None and not named:
        path.unlink(missing_ok=True)


def remove_record(path: Path) -> None:
    """Remove a flight record and the event ring beside it, as far as they are there."""
    for file in (path, event_ring_path(path)):
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def remove_left_records(run: str, nodes: str = "") -> None:
    """Remove the files of a run of this name, on this host, whose processes have ended, and kill the children of these.
    `nodes`: "*" for those of all nodes of an agent, of which several may share a host.
    """
    pattern = flight_record_path(run, 0, 0)
    for path in pattern.parent.glob(pattern.name.replace("-0-00000.flight", f"{nodes}-*-*.*")):
        with contextlib.suppress(OSError, FlightRecordError, EventRingError):
            ring = path == event_ring_path(path)
            pid = EventRingReader(path).pid if ring else read_flight_record(path, head_only=True).pid
            if not process_exists(pid):
                path.unlink()
                if not ring:
                    _kill_children(path)


def _kill_children(record: Path) -> None:
    """Kill the children of a rank that has died with its launcher: their environment names its flight record."""
    mark = f"{FLIGHT_RECORD_VARIABLE}={record}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def process_states(records: Mapping[int, FlightRecord]) -> dict[int, str]:
    """Return the letters in /proc of the states of ranks' processes, by rank, without processes that are gone.

    The letter is the first thread's. A rank without heartbeats that sleeps by it is running, "R", if its threads use a
    tenth of a core during LOOK_S.
    """
    letters = {}
    for rank, record in records.items():
        with contextlib.suppress(OSError):
            letters[rank] = process_state(record.pid)
    silent = [rank for rank, letter in letters.items() if letter == "S" and records[rank].silent_s > SILENT_S]
    before = {rank: cpu_seconds(records[rank].pid) for rank in silent}
    time.sleep(LOOK_S if silent else 0.0)
    for rank in silent:
        if cpu_seconds(records[rank].pid) - before[rank] > LOOK_S / 10:
            letters[rank] = "R"
    return letters


def read_flight_records(paths: Mapping[int, Path]) -> dict[int, FlightRecord]:
    """Read the records of ranks, as far as they can be read."""
    records = {}
    for rank, path in paths.items():
        with contextlib.suppress(OSError, FlightRecordError):
            records[rank] = read_flight_record(path)
    return records
