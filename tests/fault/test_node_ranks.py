"""Flight records that a lost node has left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megascale.core.flight_record import flight_record_path
from megascale.fault.node_ranks import remove_lost_records

BEGIN = """
import sys
from pathlib import Path
from megascale.core.flight_writer import FlightIdentity, open_flight_record
open_flight_record(FlightIdentity(sys.argv[1], 0, 1, 0), Path(sys.argv[2]))
print(flush=True)
sys.stdin.read()
"""


def start_rank(run: str, path: Path) -> subprocess.Popen[bytes]:
    """Start a process with a flight record, which lives until its stdin ends."""
    command = [sys.executable, "-c", BEGIN, run, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def test_records_of_ended_ranks_are_removed_and_those_of_running_ranks_and_other_runs_stay() -> None:
    run = f"test-lost-records-{os.getpid()}"
    paths = [flight_record_path(name, 1, 0) for name in (f"{run}@node0", f"{run}@node1", f"{run}2@node0")]
    ended, running, other = [start_rank(run, path) for path in paths]
    try:
        for process in (ended, other):
            process.communicate()
        remove_lost_records(run)
        assert [path.exists() for path in paths] == [False, True, True]
    finally:
        running.communicate()
        for path in paths:
            path.unlink(missing_ok=True)
