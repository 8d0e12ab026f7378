"""The diagnosis of runs: from live ranks, from the event store alone, and of runs that do not hang."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.operate.node.stacks import stack_of
from megascale.operate.show import diagnosis
from megascale.operate.show.diagnosis import RunDiagnosis, diagnose
from megascale.operate.show.diagnosis_text import diagnosis_json, diagnosis_text
from megascale.operate.show.last_states import SHARED, STORED, StatesError, read_last_states
from megascale.operate.show.run_reader import RunReader
from megascale.operate.store.table_files import TableFile, write_rows
from megascale.record import log_files
from megascale.record.layout import Phase
from megascale.record.log_files import FLIGHT_RECORD_VARIABLE, log_of_rank
from tests.operate.diagnose.hang.test_flight import recorders, stuck, write
from tests.operate.show.folders import incident, live_rank, make_run, write_incidents, write_live, write_metrics
from tests.operate.show.hung_runs import CULPRIT, hanging_records, make_hung_run, write_states
from tests.operate.store.tables import rows

LONG_AGO_S = 300.0

RUN = Path("runs", "test")
"""The run's folder, in the folder of a test."""


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(log_files, "SHARED_MEMORY", folder)
    return folder


def found_in(run: Path) -> RunDiagnosis:
    view = RunReader(run).read()
    return diagnose(view, read_last_states(view), stack_of)


def test_from_the_event_store_alone(tmp_path: Path) -> None:
    run = make_hung_run(tmp_path)
    found = found_in(run)
    assert found.verdict is not None
    assert (found.condition, found.verdict.ranks, found.verdict.kind) == ("hangs", (CULPRIT,), "collective")
    assert found.what == "rank 5 on node1 did not join a collective in which others wait"
    text = diagnosis_text(found)
    assert text.startswith(f"HUNG when last seen: {found.what}\nverdict  collective, in group ")
    assert "no rank has made progress for 1m 00s, step 2 of 20" in text
    assert "seen     all 8 ranks: event store, " in text
    assert "\n  rank 5 waits for no rank\n" in text
    assert "process 1 on node1\n" in text
    plain = json.loads(json.dumps(diagnosis_json(found)))
    assert (plain["verdict"]["nodes"], plain["verdict"]["confident"]) == (["node1"], True)
    assert plain["chain"][-1]["awaited"] == CULPRIT
    assert sorted(rank for each in plain["waiting"] for rank in each["ranks"]) == [0, 1, 2, 3, 4, 6, 7]


def test_a_stopped_rank_of_whose_process_nothing_is_known(tmp_path: Path) -> None:
    """A rank without a heartbeat may be stopped, or hold Python's lock; a live file that is no longer written tells."""
    run = make_hung_run(tmp_path, hanging_records("stop"))
    assert "rank 5 on node1 has had no heartbeat for 5s: it is stopped (SIGSTOP" in found_in(run).what
    ranks = [live_rank("step", 2, 60, 60, "T" if rank == CULPRIT else "") for rank in range(8)]
    write_live(run, ranks, age_s=LONG_AGO_S)
    assert found_in(run).what == "rank 5 on node1 is stopped (SIGSTOP, a debugger or a frozen container)"


def test_a_run_that_makes_progress_is_not_called_hung(tmp_path: Path) -> None:
    run = make_hung_run(tmp_path)  # the store has old states
    write_live(run, [live_rank("step", 3, 2)] * 8)
    found = found_in(run)
    assert (found.condition, found.verdict) == ("makes progress", None)
    assert diagnosis_text(found).startswith("NO HANG: the run makes progress, step 2 of 20; the last was 2s ago")
    write_live(run, [live_rank("step", 3, 60)] * 8)
    assert found_in(run).condition == "hangs"


def test_runs_that_have_ended_are_not_called_hung(tmp_path: Path) -> None:
    run = make_hung_run(tmp_path)
    write_live(run, [live_rank("done", 20)] * 8, status=0)
    assert diagnosis_text(found_in(run)).startswith("NO HANG: the run has ended (done)")
    (run / "live.json").unlink()
    write_states(run, {rank: replace(r, phase=Phase.DONE, wait=None) for rank, r in hanging_records().items()})
    assert found_in(run).condition == "has ended"
    write_states(run, hanging_records(idle_s=1.0))
    write_error(run, 6, "out of memory", peer_was_lost=False)
    assert found_in(run).condition == "has ended"


def test_a_run_on_other_hosts_of_which_the_store_alone_tells(tmp_path: Path) -> None:
    """Under torchrun nobody writes a live file: seen from a login node, a healthy run has new states."""
    run = make_hung_run(tmp_path, {rank: replace(r, start=5.0) for rank, r in hanging_records(idle_s=1.0).items()})
    found = found_in(run)
    assert found.condition == "makes progress" and found.age_s >= 5.0
    assert diagnosis_text(found).startswith("NO HANG: the run makes progress, step 2 of 20; as of 5s ago\n")
    write_error(run, 4, "of an earlier start", peer_was_lost=False)
    assert found_in(run).condition == "makes progress"
    write_states(run, hanging_records(idle_s=1.0), age_s=40.0)
    (run / "logs" / "rank-4.error.json").unlink()
    found = found_in(run)
    assert found.condition == "is out of sight"
    first, _, rest = diagnosis_text(found).partition("\n")
    assert first == ("NO HANG when last seen, 40s ago, step 2 of 20: the run is not running any more, or out of sight")
    assert "not running, or on other hosts" in rest
    (run / "metrics.jsonl").unlink()
    write_metrics(run, range(1, 21))
    assert found_in(run).condition == "has ended"


def test_a_long_first_step_is_no_hang(tmp_path: Path) -> None:
    """It may compile. Later steps are judged by the time of the steps in the records."""
    slow = {rank: replace(r, step_time_s=0.0, first_step=r.step) for rank, r in hanging_records(idle_s=60.0).items()}
    run = make_hung_run(tmp_path, slow)
    found = found_in(run)
    assert (found.condition, found.limit_s) == ("makes progress", 300.0)
    write_states(run, {rank: replace(r, step_time_s=25.0) for rank, r in slow.items()})
    assert (found_in(run).condition, found_in(run).limit_s) == ("makes progress", 75.0)
    write_states(run, {rank: replace(r, step_time_s=5.0) for rank, r in slow.items()})
    assert found_in(run).condition == "hangs"


def write_error(run: Path, rank: int, what: str, peer_was_lost: bool) -> None:
    (run / "logs").mkdir(exist_ok=True)
    record = {"time": float(rank), "rank": rank, "host": "h", "what": what, "exit_status": 1, "peers": [5], "named": []}
    text = json.dumps(record | {"kind": "E", "peer_was_lost": peer_was_lost})
    (run / "logs" / f"rank-{rank}.error.json").write_text(text)


def test_a_run_that_ended_by_its_timeout_had_hung(tmp_path: Path) -> None:
    """At the timeout the waiting ranks write their records once more."""
    run = make_hung_run(tmp_path, hanging_records(idle_s=2.0))
    write_error(run, 4, "all_reduce of group tp lost rank 5: timed out waiting 16 s", peer_was_lost=True)
    found = found_in(run)
    assert (found.condition, found.error.partition(":")[0]) == ("hangs", "rank 4 on h")
    write_error(run, 6, "out of memory", peer_was_lost=False)
    found = found_in(run)
    assert (found.condition, found.error) == ("has ended", "rank 6 on h: out of memory")
    assert "error    rank 6 on h: out of memory" in diagnosis_text(found)
    (run / "logs" / "rank-6.error.json").write_text("{")
    assert found_in(run).error.startswith("rank 4 on h: "), "what cannot be read hides no other error"


def test_dumps_of_torch_s_flight_recorder(tmp_path: Path) -> None:
    """They stand beside the verdict, and in its place where nothing else is left."""
    run = make_hung_run(tmp_path)
    (run / "flight").mkdir()
    stuck(run / "flight", victim=3)
    assert "torch's flight recorder\n  4 dumps: rank 3 on node1 never joined all_reduce 2" in diagnosis_text(
        found_in(run)
    )
    other = make_run(tmp_path / "other")
    (other / "flight").mkdir()
    stuck(other / "flight", victim=2)
    found = found_in(other)
    assert found.verdict is not None
    assert (found.condition, found.verdict.kind, found.verdict.ranks) == ("hangs", "collective", (2,))
    text = diagnosis_text(found)
    assert text.startswith("HUNG when last seen: rank 2 on node1 did not join a collective in which others wait\n")
    assert "verdict  collective, in group dp; a single explanation" in text
    assert re.search(r"\n  dp +2 +4 +0, 1, 3 +2\n", text)
    assert (
        "rank 0 waits in all_reduce 2 of group dp (with 2 other ranks) for rank 2\n  rank 2 waits for no rank" in text
    )
    assert "seen     all 4 ranks: dumps of torch's flight recorder" in text
    assert "its dump on node1 has no operation" in text


def test_dumps_in_which_every_awaited_rank_waits_leave_the_suspect_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "flight").mkdir()
    ranks = recorders(pp=[0, 1, 2, 3], dp=[0, 1, 2, 3])
    for rank in ranks:  # each has a receive in flight
        rank.message("pp", "recv", (rank.rank + 1) % 4, at=0.1 * rank.rank, done=False)
        if rank.rank != 1:
            rank.collective("dp", at=5 + rank.rank, done=False)
    write(run / "flight", ranks)
    found = found_in(run)
    assert (found.condition, found.verdict) == ("hangs", None)
    first = "HUNG, by torch's flight recorder alone: 4 dumps: rank 1 on node0 never sent the message"
    assert diagnosis_text(found).startswith(first)


def test_the_driver_s_incidents_are_named(tmp_path: Path) -> None:
    run = make_hung_run(tmp_path)
    write_incidents(run, [incident(1)])
    assert "1: rank 1 was killed by SIGKILL; restarting the ranks in place" in diagnosis_text(found_in(run))


def test_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(StatesError, match=r"nothing tells what the ranks do: .*no event store"):
        found_in(make_run(tmp_path))


def test_damaged_stores(tmp_path: Path) -> None:
    run = make_hung_run(tmp_path)
    states = next((run / "events" / "states").iterdir())
    good = states.read_bytes()
    states.write_bytes(good[:100])
    with pytest.raises(StatesError, match=r"nothing tells what the ranks do: .*is damaged; its rows are missing"):
        found_in(run)
    write_rows(
        Location(f"{run}/events"), TableFile("states", "n", 0, 0, 1), rows("states", 3, rank=[0, 1, 2], record="{")
    )
    with pytest.raises(StatesError, match="no readable state of ranks 0, 1, 2"):
        found_in(run)


RANK = """
import sys, time
from pathlib import Path
from megascale.record.layout import Phase
from megascale.record.log_files import folder_key
from megascale.record.log import LogIdentity, open_log
rank = int(sys.argv[1])
identity = LogIdentity("test", rank, 4, folder=folder_key(Path(sys.argv[3])))
record = open_log(identity, Path(sys.argv[2]))
record.set_phase(Phase.STEP)
record.begin_step(10)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def ranks(shared_memory: Path, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Four processes with flight records, that make no progress."""
    files = [shared_memory / f"megascale-{os.geteuid()}-test-1-0000{rank}.flight" for rank in range(4)]
    words = [[sys.executable, "-c", RANK, str(rank), str(file), str(tmp_path / RUN)] for rank, file in enumerate(files)]
    found = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in words]
    try:
        assert all(process.stdout is not None and process.stdout.readline() for process in found)
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_live_ranks_on_this_host(
    tmp_path: Path, ranks: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    ranks[2].send_signal(signal.SIGSTOP)
    while Path(f"/proc/{ranks[2].pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    found = found_in(run)
    assert (found.condition, found.states.sources()) == ("makes progress", {SHARED: [0, 1, 2, 3]})
    monkeypatch.setattr(diagnosis, "standstill_limit_s", lambda *_: 0.0)
    found = found_in(run)
    assert found.verdict is not None and (found.verdict.kind, found.verdict.ranks) == ("stopped", (2,))
    assert found.what.endswith("is stopped (SIGSTOP, a debugger or a frozen container)")
    assert diagnosis_text(found).startswith("HANGS: rank 2 on ")
    assert found.culprits[0].stack and found.culprits[0].state is not None
    assert found.culprits[0].state.pid == ranks[2].pid


def test_another_job_of_the_same_name_on_this_host(
    tmp_path: Path, ranks: list[subprocess.Popen[str]], shared_memory: Path
) -> None:
    """It has another folder, and is at the same step."""
    run = make_run(tmp_path)
    write_live(run, [live_rank("step", 10)] * 4)
    path = shared_memory / f"megascale-{os.geteuid()}-test-2-00001.flight"
    env = {FLIGHT_RECORD_VARIABLE: str(path)}
    with log_of_rank(tmp_path / "other" / "test", Rank(1, 4, 0, "h"), env) as other:
        other.begin_step(10)
        found = read_last_states(RunReader(run).read()).by_rank
        assert [found[rank].pid for rank in range(4)] == [process.pid for process in ranks]


def test_some_ranks_are_on_other_hosts(
    tmp_path: Path, ranks: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    monkeypatch.setattr(diagnosis, "standstill_limit_s", lambda *_: 0.0)
    ranks[3].kill()
    ranks[3].wait()
    write_live(run, [live_rank("step", 10, 30)] * 4)
    record = replace(hanging_records()[3], world=4)
    write_states(run, {3: record}, age_s=50.0)
    found = found_in(run)
    assert found.states.sources() == {SHARED: [0, 1, 2], STORED: [3]}
    assert found.notes == ("the states of rank 3 are from before the hang: read the verdict with care",)


def test_only_states_and_ranks_are_opened(tmp_path: Path) -> None:
    """The other tables of a large job have thousands of files, some of which go at every moment."""
    run = make_hung_run(tmp_path)
    (run / "events" / "steps").mkdir()
    (run / "events" / "steps" / "n.0.1-2.parquet").write_bytes(b"damaged")
    found = found_in(run)
    assert (found.condition, found.notes) == ("hangs", ())
