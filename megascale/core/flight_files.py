"""The files of flight records on a host: their paths, and their removal by the program that starts the ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from megascale.core.flight_reader import read_flight_record
from megascale.core.flight_record import FlightRecord, FlightRecordError, flight_record_path
from megascale.core.process import process_exists


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
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def remove_left_records(run: str) -> None:
    """Remove the records of a run of this name, on this host, whose processes have ended."""
    pattern = flight_record_path(run, 0, 0)
    for path in pattern.parent.glob(pattern.name.replace("-0-00000.", "-*-*.")):
        with contextlib.suppress(OSError, FlightRecordError):
            if not process_exists(read_flight_record(path).pid):
                path.unlink()


def read_flight_records(paths: Mapping[int, Path]) -> dict[int, FlightRecord]:
    """Read the records of ranks, as far as they can be read."""
    records = {}
    for rank, path in paths.items():
        with contextlib.suppress(OSError, FlightRecordError):
            records[rank] = read_flight_record(path)
    return records
