"""What is known about one rank, wherever it stands."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.operate.show.neighbours import place_in
from megascale.operate.show.rank_details import MOST_LINES, read_rank_details, read_rank_stack
from megascale.operate.show.run_reader import RunReader
from megascale.operate.store import query
from megascale.operate.store.table_files import TableFile, write_rows
from megascale.record import log_files
from megascale.record.log_files import ATTEMPT_VARIABLE, FLIGHT_RECORD_VARIABLE, log_of_rank
from megascale.record.log_reader import read_state
from tests.operate.show.folders import incident, live_rank, make_run, write_incidents, write_live
from tests.operate.store.tables import rows


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(log_files, "SHARED_MEMORY", folder)
    return folder


def test_place_incidents_error_and_output(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_incidents(folder, [incident(1), incident(2)])
    logs = folder / "logs" / "attempt-2"
    logs.mkdir(parents=True)
    (logs / "rank-1.log").write_text("".join(f"line {number}\n" for number in range(200)))
    (logs / "rank-1.error.json").write_text(json.dumps({"what": "out of memory", "exit_status": 1}))
    view = RunReader(folder).read()
    details = read_rank_details(view, 1)
    assert place_in(view, 1).groups == {"tp": (0, 1), "pp": (1, 3)}
    assert details.incidents == tuple(f"incident {n}, step 7: rank 1 was killed by SIGKILL" for n in (1, 2))
    assert details.error == "out of memory"
    assert (len(details.output), details.output[-1]) == (MOST_LINES, "line 199")
    assert details.log == logs / "rank-1.log"
    assert details.state is None
    assert read_rank_details(view, 0).incidents == ()
    with pytest.raises(IndexError):
        place_in(view, 4)


@pytest.mark.parametrize("content", ["{", "[1]", '{"what": 3}'])
def test_an_error_file_that_says_nothing(content: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.error.json").write_text(content)
    assert read_rank_details(RunReader(folder).read(), 0).error in ("", "3")


def test_the_record_of_a_rank_on_this_host(tmp_path: Path, shared_memory: Path) -> None:
    folder = make_run(tmp_path)
    write_live(folder, [live_rank("step", 1)] * 4)
    path = shared_memory / f"megascale-{os.geteuid()}-test-1-00002.flight"
    with log_of_rank(folder, Rank(2, 4, 0, "h"), {FLIGHT_RECORD_VARIABLE: str(path)}) as record:
        record.begin_step(1)
        view = RunReader(folder).read()
        details = read_rank_details(view, 2)
        assert read_rank_stack(view, 2, "stack of {}".format) == f"stack of {os.getpid()}"
        assert read_rank_stack(view, 1) == "rank 1 has no process on this host"
    assert details.state is not None
    assert (details.state.step, details.state.source) == (1, "shared memory of this host")


def test_a_record_of_another_run_of_the_same_name_is_left_out(tmp_path: Path, shared_memory: Path) -> None:
    folder = make_run(tmp_path)
    write_live(folder, [live_rank("step", 50)] * 4)
    path = shared_memory / f"megascale-{os.geteuid()}-test-1-00002.flight"
    other = tmp_path / "elsewhere" / "test"
    with log_of_rank(other, Rank(2, 4, 0, "h"), {FLIGHT_RECORD_VARIABLE: str(path)}) as record:
        record.begin_step(50)
        assert read_rank_details(RunReader(folder).read(), 2).state is None


def test_the_last_record_in_the_store(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    path = tmp_path / "a.flight"
    with log_of_rank(folder, Rank(3, 4, 0, "h"), {FLIGHT_RECORD_VARIABLE: str(path)}) as record:
        texts = []
        for step in (7, 8):
            record.begin_step(step)
            texts.append(json.dumps(read_state(path).to_dict()))
    table = rows("states", 3, rank=[3, 3, 0], time_ns=[1, 2, 3], record=[*texts, "nonsense"])
    write_rows(Location(f"{folder}/events"), TableFile("states", "n", 0, 0, 1), table)
    view = RunReader(folder).read()
    details = read_rank_details(view, 3)
    assert details.state is not None
    assert (details.state.step, details.state.source) == (8, "event store")
    assert read_rank_details(view, 0).state is None


def test_only_the_table_of_states_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dashboard asks every two seconds, and other tables of a large job have many files."""
    folder, listed, tables = make_run(tmp_path), query.list_files, set[str]()

    def list_files(store: Location, table: str) -> list[TableFile]:
        tables.add(table)
        return listed(store, table)

    write_rows(Location(f"{folder}/events"), TableFile("states", "n", 0, 0, 1), rows("states", 1))
    monkeypatch.setattr(query, "list_files", list_files)
    read_rank_details(RunReader(folder).read(), 0)
    assert tables == {"states"}


def test_a_rank_is_found_at_any_step_by_any_path_of_its_folder(tmp_path: Path, shared_memory: Path) -> None:
    """Whatever the live file said a second ago: a rank may train hundreds of steps a second."""
    folder = make_run(tmp_path)
    write_live(folder, [live_rank("step", 50)] * 4)
    link = tmp_path / "link"
    link.symlink_to(folder)
    path = shared_memory / f"megascale-{os.geteuid()}-test-1-00000.flight"
    with log_of_rank(link, Rank(0, 4, 0, "h"), {FLIGHT_RECORD_VARIABLE: str(path)}) as record:
        for step in (1, 50, 90_000):
            record.begin_step(step)
            details = read_rank_details(RunReader(folder).read(), 0)
            assert details.state is not None and details.state.step == step


def test_the_newest_of_two_records_of_a_rank(tmp_path: Path, shared_memory: Path) -> None:
    """The rank of an attempt that is being stopped may still live."""
    folder = make_run(tmp_path)
    write_live(folder, [live_rank("step", 5)] * 4)
    for attempt in (1, 0):  # the second is the newer one
        path = shared_memory / f"megascale-{os.geteuid()}-test-{attempt}-00000.flight"
        env = {FLIGHT_RECORD_VARIABLE: str(path), ATTEMPT_VARIABLE: str(attempt)}
        with log_of_rank(folder, Rank(0, 4, 0, "h"), env) as record:
            record.begin_step(5)
    details = read_rank_details(RunReader(folder).read(), 0)
    assert details.state is not None and details.state.attempt == 0
