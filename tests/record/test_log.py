"""The state of a rank: written in one process, read in another, whatever the writer does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.record import layout, log_reader
from megascale.record import log as log_module
from megascale.record.label import Label
from megascale.record.layout import Phase
from megascale.record.log import LogIdentity, RankLog, open_log
from megascale.record.log_files import log_path
from megascale.record.log_reader import read_state
from megascale.record.rank_state import LogError, RankRuns, RankState

IDENTITY = LogIdentity("a run", rank=3, world=8, attempt=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-3.flight"


def opened(path: Path) -> RankLog:
    writer = open_log(IDENTITY, path)
    writer.open_group("dp", range(1, 8, 2))
    writer.open_group("pp.up", (3, 7))
    return writer


def test_the_head_phase_step_and_totals_are_read(path: Path) -> None:
    writer = opened(path)
    writer.set_phase(Phase.STEP)
    for step, seconds in ((11, 9.0), (12, 0.5), (13, 0.7)):
        writer.begin_step(step)
        writer.end_step(seconds, {"tokens": step * 100.0, "loss": 2.5})
    record = read_state(path)
    assert (record.run, record.rank, record.world, record.attempt, record.pid) == ("a run", 3, 8, 2, os.getpid())
    assert (record.phase, record.step, record.step_time_s) == (Phase.STEP, 13, 0.7)
    assert record.totals == {"tokens": 1300.0, "loss": 2.5}
    assert record.start > 1e9 and 0 <= record.idle_s < 60 and 0 <= record.silent_s < 60
    assert record.wait is None and record.groups == {} and record.last == ()


def test_a_communication_is_entered_issued_waited_for_and_completed(path: Path) -> None:
    writer = opened(path)
    writer.complete(writer.enter("dp", "all_reduce"))
    handle = writer.enter("dp", "all_gather", Label("qkv", 3), nbytes=64, place=(12, 1, 5))
    entered = read_state(path)
    writer.issued(handle)
    issued = read_state(path)
    writer.begin_wait(handle)
    waiting = read_state(path)
    writer.complete(handle)
    complete = read_state(path)
    steps = [(r.groups["dp"].entered, r.groups["dp"].issued, r.groups["dp"].completed, r.wait and r.wait.kind)
             for r in (entered, issued, waiting, complete)]  # fmt: skip
    assert steps == [(2, 0, 1, "issuing"), (2, 2, 1, None), (2, 2, 1, "waiting"), (2, 2, 2, None)]
    assert waiting.wait is not None and (waiting.wait.group, waiting.wait.sequence) == ("dp", 1)
    [event] = waiting.open
    assert (event.kind, event.name, event.group, event.sequence) == ("collective", "all_gather", "dp", 1)
    assert (event.part, event.layer, event.bytes) == ("qkv", 3, 64)
    assert (event.step, event.chunk, event.microbatch, event.peer) == (12, 1, 5, -1)
    assert event.issued_ns <= event.waiting_ns and complete.last[-1].ended_ns >= event.waiting_ns
    assert complete.open == () and complete.progress > entered.progress
    assert list(complete.groups["dp"].ranks or ()) == [1, 3, 5, 7]


def test_messages_count_by_direction_and_peer(path: Path) -> None:
    writer = opened(path)
    writer.issued(writer.enter("pp.up", "send", peer=7, kind="send"))
    writer.issued(writer.enter("pp.up", "receive", peer=7, kind="receive"))
    writer.issued(writer.enter("pp.up", "send", peer=7, kind="send"))
    groups = read_state(path).groups
    assert {key: state.issued for key, state in groups.items()} == {"pp.up send 7": 2, "pp.up receive 7": 1}
    assert {state.peer for state in groups.values()} == {7}


def test_the_ring_keeps_the_newest_events(path: Path) -> None:
    writer = opened(path)
    oldest = writer.enter("dp", "all_reduce")
    for index in range(layout.NEWEST + 5):
        writer.end_action(writer.begin_action("F", (1, 0, index)))
    writer.begin_wait(oldest)
    record = read_state(path)
    assert [event.microbatch for event in record.last] == list(range(5, layout.NEWEST + 5))
    assert record.open == ()
    assert record.wait is not None and record.wait.group == "dp"


def test_more_groups_strings_and_totals_than_fit(path: Path) -> None:
    writer = opened(path)
    writer.end_step(1.0, {f"total {index}": 1.0 for index in range(layout.TOTALS + 3)})
    for index in range(layout.TEXTS + 50):
        writer.issued(writer.enter(f"group {index}", f"operation {index}"))
    record = read_state(path)
    assert len(record.groups) == layout.GROUPS and len(record.totals) == layout.TOTALS
    assert record.last[-1].name == "(other)"


def test_ranks_in_more_runs_than_fit_are_unknown(path: Path) -> None:
    writer = opened(path)
    writer.open_group("odd", [n * n for n in range(40)])
    writer.issued(writer.enter("odd", "all_reduce"))
    assert read_state(path).groups["odd"].ranks is None


def test_the_json_form(path: Path) -> None:
    writer = opened(path)
    writer.end_action(writer.begin_action("F", (1, 0, 0)))
    writer.begin_wait(writer.enter("dp", "all_reduce"))
    writer.end_step(1.0, {"tokens": 5.0})
    record = read_state(path)
    data = json.loads(json.dumps(record.to_dict()))
    assert RankState.from_dict(data) == record
    for broken in ({}, data | {"phase": "sleeping"}, data | {"wait": [1]}, data | {"groups": [["dp"]]}):
        with pytest.raises(LogError):
            RankState.from_dict(broken)


@pytest.mark.parametrize("ranks", [(0,), (4, 6, 8), (0, 1, 8, 9), (0, 11), tuple(range(12288))])
def test_ranks_as_runs(ranks: tuple[int, ...]) -> None:
    runs = RankRuns.from_ranks(ranks)
    assert tuple(sorted(runs)) == ranks and len(runs) == len(ranks) and len(runs.runs) <= 2
    assert all(rank in runs for rank in ranks[:100]) and -1 not in runs and 12289 not in runs


def test_garbled_content_is_read_without_an_error(path: Path) -> None:
    opened(path)
    content = path.read_bytes()
    for seed in range(50):
        noise = (bytes([seed * 5 % 256]) * 7 + os.urandom(25)) * (len(content) // 32 + 1)
        with path.open("r+b") as file:  # a cut file would end the writer's heartbeat, and this process, by SIGBUS
            file.write((content[: 2 * layout.WORD] + noise)[: len(content)])
        read_state(path)


def test_a_record_that_cannot_be_made_does_not_end_the_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = open_log(IDENTITY, tmp_path / "missing" / "x.flight")
    writer.complete(writer.enter("dp", "all_reduce"))
    assert "WARNING: no flight record" in capsys.readouterr().err


def test_the_path_is_of_a_run_a_start_and_a_rank() -> None:
    path = log_path("runs/../a b", 17, 3)
    assert path.parent == Path("/dev/shm") and path.name.endswith("-runs_.._a_b-17-00003.flight")


WRITER = """
import re, sys, threading, time
from pathlib import Path
from megascale.record.log import LogIdentity, open_log
writer = open_log(LogIdentity("test"), Path(sys.argv[1]))
writer.open_group("dp", (0, 1))
writer.begin_wait(writer.enter("dp", "all_reduce"))
print("ready", flush=True)
if sys.argv[2] == "lock":
    re.match("(a?){30}a{30}", "a" * 30)
while sys.argv[2] == "write":
    writer.complete(writer.enter("dp", "all_reduce"))
    until = time.perf_counter() + 2e-4
    while time.perf_counter() < until:
        pass
time.sleep(60)
"""


@pytest.fixture
def rank(path: Path, request: pytest.FixtureRequest):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), request.param], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("rank", ["sleep"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_or_killed_rank_is_read(path: Path, rank: subprocess.Popen, number: int) -> None:
    rank.send_signal(number)
    record = read_state(path)
    assert record.pid == rank.pid
    assert record.wait is not None and (record.wait.kind, record.wait.group) == ("waiting", "dp")


def test_a_late_beat_is_a_pause_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(log_module, "_now", lambda: now[0])
    writer = RankLog()
    for seconds in (0.25, 0.55, 1.75, 2.0):
        now[0] = round(seconds * 1e9)
        writer.beat()
    assert list(writer.pauses) == [(pytest.approx(0.8), 1.75)]


@pytest.mark.parametrize("rank", ["lock", "sleep"], indirect=True)
def test_the_heartbeat_stands_still_while_python_is_locked(path: Path, rank: subprocess.Popen) -> None:
    holds_lock = "lock" in rank.args[-1]  # type: ignore[index]
    first = read_state(path).heartbeat_ns
    for _ in range(20):
        signal.sigtimedwait([], 0.1)
        if (last := read_state(path).heartbeat_ns) != first:
            break
    assert (last == first) == holds_lock


@pytest.mark.parametrize("rank", ["write"], indirect=True)
def test_copies_of_a_live_record_are_consistent(
    path: Path, rank: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "READ_ATTEMPTS", 10**6)  # a busy host may pause the writer within a write
    for _ in range(300):
        record = read_state(path)
        state = record.groups["dp"]
        assert state.entered - state.completed in (0, 1, 2)
        sequences = [event.sequence for event in record.last]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
        assert state.entered == sequences[-1] + 1
