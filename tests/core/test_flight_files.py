"""Flight records do not stay behind in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.core import flight_record
from megascale.core.flight_files import flight_record_files, read_flight_records
from megascale.core.flight_writer import FlightIdentity, open_flight_record


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(flight_record, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_files_are_removed_after_the_block_also_on_an_error(shared_memory: Path) -> None:
    with pytest.raises(KeyboardInterrupt), flight_record_files("a run", range(2)) as paths:
        open_flight_record(FlightIdentity("a run", 0, 2), paths[0])
        assert {rank: record.rank for rank, record in read_flight_records(paths).items()} == {0: 0}
        raise KeyboardInterrupt
    assert not list(shared_memory.iterdir())


LEFT = """
import sys
from pathlib import Path
from megascale.core.flight_writer import FlightIdentity, open_flight_record
open_flight_record(FlightIdentity("a run"), Path(sys.argv[1]))
"""


def test_files_of_ended_ranks_are_removed_first(shared_memory: Path) -> None:
    names = {name: f"megascale-{os.geteuid()}-{name}-7-00000.flight" for name in ("a_run", "another")}
    for name in names.values():
        subprocess.run([sys.executable, "-c", LEFT, str(shared_memory / name)], check=True)
    with flight_record_files("a run", ()):
        assert [path.name for path in shared_memory.iterdir()] == [names["another"]]


def test_files_of_running_ranks_stay(shared_memory: Path) -> None:
    """Two jobs of the same run's name, in two folders."""
    with flight_record_files("a run", [0]) as paths:
        open_flight_record(FlightIdentity("a run"), paths[0])
        with flight_record_files("a run", [0]):
            assert paths[0].exists()
