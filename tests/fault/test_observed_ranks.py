"""The ranks that an observer watches: those of its run's folder, and of no other run of its name."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from megascale.core import flight_record
from megascale.core.flight_files import flight_record_of_rank
from megascale.core.flight_record import FLIGHT_RECORD_VARIABLE
from megascale.core.rank import Rank
from megascale.fault import observed_ranks
from megascale.fault.messages import RankEnd
from megascale.fault.observed_ranks import ObservedRanks


@pytest.mark.parametrize(("folder", "watched"), [("a/run", (3,)), ("b/run", ()), ("a/run-b", ())])
def test_ranks_of_the_run_s_folder_are_watched(
    folder: str, watched: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_record, "SHARED_MEMORY", tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    path = tmp_path / f"megascale-{os.geteuid()}-{Path(folder).name}-1-00003.flight"
    with flight_record_of_rank(tmp_path / folder, Rank(3, 4, 3, "host"), {FLIGHT_RECORD_VARIABLE: str(path)}):
        ranks = ObservedRanks(tmp_path / "link" / "run", print)

        async def poll() -> None:
            ranks.poll()

        asyncio.run(poll())
        assert ranks.running == watched


def test_an_error_file_that_cannot_be_read_shows_a_fault_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_record, "SHARED_MEMORY", tmp_path)
    (tmp_path / "run" / "logs" / "rank-3.error.json").mkdir(parents=True)
    path = tmp_path / f"megascale-{os.geteuid()}-run-1-00003.flight"
    ends: list[RankEnd] = []
    ranks = ObservedRanks(tmp_path / "run", ends.append)
    with flight_record_of_rank(tmp_path / "run", Rank(3, 4, 3, "host"), {FLIGHT_RECORD_VARIABLE: str(path)}):

        async def see_the_end() -> None:
            ranks.poll()
            monkeypatch.setattr(observed_ranks, "process_exists", lambda pid: False)
            ranks.poll()

        asyncio.run(see_the_end())
    assert [(end.in_order, end.patterns) for end in ends] == [(False, ("status_unknown", "storage_error"))]
