"""The live file of the local launcher: from the flight records and ends of its ranks, and its end as a status."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascale.core.errors import Exit
from megascale.core.rank import Rank
from megascale.operate.node.live_ranks import live_file
from megascale.operate.node.workers import Worker
from megascale.record.layout import Phase
from megascale.record.live_file import LIVE_FILE, LiveRank, read_live_file
from megascale.record.log_files import FLIGHT_RECORD_VARIABLE, log_of_rank


def sleeping(rank: int, seconds: float) -> Worker:
    return Worker(rank, subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"]), None)


def test_states_are_written_and_the_status_at_the_end(tmp_path: Path) -> None:
    workers = [sleeping(0, 60), sleeping(1, 60)]
    records = {rank: tmp_path / f"{rank}.flight" for rank in range(2)}
    env = {FLIGHT_RECORD_VARIABLE: str(records[0])}
    said: list[str] = []
    try:
        with log_of_rank(tmp_path, Rank(0, 2, 0, "host"), env) as record:
            record.set_phase(Phase.DATA)
            with live_file(tmp_path / LIVE_FILE, workers, records, said.append) as job:
                while not (tmp_path / LIVE_FILE).exists():
                    time.sleep(0.01)
                assert read_live_file(tmp_path / LIVE_FILE).ranks == (LiveRank("data", 0), LiveRank())
                workers[1].process.kill()
                workers[1].process.wait()
                workers[1].ended()
                job.status = 93
        state = read_live_file(tmp_path / LIVE_FILE)
        assert (state.status, state.ranks[1]) == (93, LiveRank(state="X"))
        assert not said
    finally:
        workers[0].process.kill()
        workers[0].process.wait()


def test_an_error_of_the_launcher_is_an_end(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), live_file(tmp_path / LIVE_FILE, [], {}, print):
        raise RuntimeError
    assert read_live_file(tmp_path / LIVE_FILE).status == Exit.UNCLASSIFIED


def test_a_folder_that_is_gone_is_said_once_and_does_no_harm(tmp_path: Path) -> None:
    said: list[str] = []
    with live_file(tmp_path / "absent" / LIVE_FILE, [], {}, said.append):
        while not said:
            time.sleep(0.01)
    assert said == ["megascale: WARNING: the live file cannot be written: No such file or directory"]
