"""Events in a log: each comes back once, as soon as it has ended, or is counted as lost."""

from __future__ import annotations

import mmap
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.record import layout
from megascale.record.label import Label
from megascale.record.layout import OTHER_TEXT, TEXTS
from megascale.record.log import LogIdentity, RankLog, StepRow, open_log
from megascale.record.log_reader import Drained, LogReader, event_dtype, read_state, step_dtype
from megascale.record.rank_state import LogError

IDENTITY = LogIdentity("a run", rank=3, world=8, attempt=2, note={"url": "/runs/ä", "interval_s": 1.5})
CAPACITY = 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-3.flight"


@pytest.fixture
def log(path: Path) -> RankLog:
    return open_log(IDENTITY, path, CAPACITY)


def begin(log: RankLog, sequence: int) -> int:
    """Write an event whose fields all follow from its sequence number, and return the event's number."""
    label = Label("qkv", sequence % 7, sequence % 5, "forward")
    place = (sequence, 1, 2)
    return log.enter("tp.0", "all_gather", label, 8 * sequence, 5, place, stored=("tp", sequence))[2]


def end(log: RankLog, number: int, sequence: int) -> None:
    log.write_times(number, sequence + 0.25, sequence + 0.5, sequence + 0.75, 0.125)


def write(log: RankLog, sequence: int) -> None:
    """Write an event that has ended."""
    end(log, begin(log, sequence), sequence)


def sequences(drained: Drained) -> list[int]:
    """The sequence numbers of events, which are whole."""
    events = drained.events
    assert (events["step"] == events["sequence"]).all() and (events["bytes"] == 8 * events["sequence"]).all()
    assert (events["end"] == events["sequence"] + 0.75).all()
    return events["sequence"].tolist()


def test_events_and_steps_have_the_size_of_a_place() -> None:
    for dtype, packed in ((event_dtype(), layout.EVENT_STRUCT), (step_dtype(), layout.STEP_STRUCT)):
        assert dtype.itemsize == layout.PLACE_BYTES == packed.size
        assert dtype.fields is not None and dtype.fields["state"][1] == layout.offset_of("state")
    assert layout.PLACE_BYTES % layout.WORD == layout.PLACES_OFFSET % layout.WORD == 0


def test_an_event_comes_back(log: RankLog, path: Path) -> None:
    write(log, 9)
    reader = LogReader(path)
    drained, texts = reader.drain(), reader.texts()
    [event] = drained.events
    assert [event[name] for name in ("issue", "start", "end", "exposed")] == [9.25, 9.5, 9.75, 0.125]
    assert [event[name] for name in ("step", "chunk", "microbatch", "layer", "stage")] == [9, 1, 2, 2, 4]
    assert [event[name] for name in ("sequence", "peer", "bytes")] == [9, 5, 72]
    found = [texts[event[name]] for name in ("axis", "name", "part", "group_name", "direction")]
    assert found == ["tp", "all_gather", "qkv", "tp.0", "forward"]
    assert not len(drained.steps) and drained.lost == 0


def test_loads_of_experts_come_back_once(log: RankLog, path: Path) -> None:
    reader, loads = LogReader(path), np.array([[0, 0, 0], [0.5, 2.5, 0]], "<f2")
    assert reader.expert_loads() is None
    log.tables.set_expert_loads(7, 3, loads.flatten().tolist())
    found = reader.expert_loads()
    assert found is not None and found[0] == 7 and found[1].tolist() == loads.tolist()
    assert reader.expert_loads() is None
    log.tables.set_expert_loads(8, 1, [0.0] * (layout.LOADS + 1))
    assert reader.expert_loads() is None, "too many"
    log.tables.set_expert_loads(9, 3, loads.flatten().tolist())
    log._words[layout.LOADS_OFFSET // layout.WORD] -= 1
    assert reader.expert_loads() is None, "a write is under way"


def test_a_step_comes_back(log: RankLog, path: Path) -> None:
    row = StepRow(1.0, 3.5, 2.0, 4096, 1 << 33, 1e15, 2.25, float("nan"), 7, 0b101)
    log.write_step(row)
    [step] = LogReader(path).drain().steps
    for name in StepRow._fields:
        assert step[name] == getattr(row, name) or name == "grad_norm"
    assert np.isnan(step["grad_norm"])


def test_an_action_and_an_activity_come_back(log: RankLog, path: Path) -> None:
    log.write_times(log.begin_action("F", (4, 1, 2)), 1.0, 1.0, 2.0, 0.5)
    log.write_activity("gc", 4, 2.0, 3.0, 1.0)
    reader = LogReader(path)
    events, texts = reader.drain().events, reader.texts()
    assert [texts[name] for name in events["axis"]] == ["compute", "host"]
    assert [texts[name] for name in events["name"]] == ["F", "gc"]
    assert events[["step", "chunk", "microbatch", "sequence", "peer", "layer", "stage"]].tolist() == [
        (4, 1, 2, -1, -1, -1, -1), (4, -1, -1, -1, -1, -1, -1),
    ]  # fmt: skip
    assert [event.name for event in reader.state().last] == ["F"], "what the host did besides is no part of a program"


def test_an_event_is_read_once_it_has_ended(log: RankLog, path: Path) -> None:
    reader = LogReader(path)
    early, late = begin(log, 1), begin(log, 2)
    assert sequences(reader.drain()) == []
    end(log, late, 2)
    assert sequences(reader.drain()) == [2]
    write(log, 3)
    end(log, early, 1)
    assert [sequences(reader.drain()), sequences(reader.drain())] == [[1, 3], []]


def test_what_gets_no_times_is_in_the_state_alone(log: RankLog, path: Path) -> None:
    log.complete(log.enter("world", "barrier", kind="control"))
    reader = LogReader(path)
    drained = reader.drain()
    assert (len(drained.events), drained.lost) == (0, 0)
    assert [event.name for event in reader.state().last] == ["barrier"]


def test_the_head_and_the_note(log: RankLog, path: Path) -> None:
    reader = LogReader(path)
    state = reader.state(head_only=True)
    assert (state.run, state.rank, state.world, state.attempt, state.pid) == ("a run", 3, 8, 2, os.getpid())
    assert (state.stored_attempt, state.coord) == (None, {})
    assert reader.note == dict(IDENTITY.note)
    log.set_ready(4, 10**18, {"tp": 1, "cp": 0, "dp": 3, "pp": 2, "ep": 1, "dp_shard": 3}, 9.89e14)
    state = reader.state(head_only=True)
    assert (state.stored_attempt, state.epoch_ns, state.peak_flops) == (4, 10**18, 989 * 10**12)
    assert state.coord == {"tp": 1, "cp": 0, "dp": 3, "pp": 2, "ep": 1, "dp_shard": 3} and state.attempt == 2


@given(st.lists(st.integers(0, 2 * CAPACITY), max_size=12))
def test_an_event_is_read_once_or_counted_as_lost(written: list[int]) -> None:
    """A reader that comes in time loses at most the place in which the next event may be under way."""
    log = RankLog(IDENTITY, mmap.mmap(-1, layout.log_bytes(CAPACITY)))
    reader = LogReader(log.memory)
    total = 0
    for count in written:
        for sequence in range(total, total + count):
            write(log, sequence)
        total += count
        drained = reader.drain()
        kept = min(count, CAPACITY - 1) if count >= CAPACITY else count
        assert sequences(drained) == list(range(total - kept, total))
        assert drained.lost == count - kept


@given(st.lists(st.one_of(st.just("begin"), st.just("drain"), st.integers(0, 30)), max_size=80))
def test_events_that_end_in_any_order_are_read_once_or_counted_as_lost(script: list[str | int]) -> None:
    log = RankLog(IDENTITY, mmap.mmap(-1, layout.log_bytes(CAPACITY)))
    reader = LogReader(log.memory)
    numbers: list[int] = []
    ended: set[int] = set()
    found: list[int] = []
    lost = 0
    for move in [*script, "drain"]:
        if move == "begin":
            numbers.append(begin(log, len(numbers)))
        elif move == "drain":
            drained = reader.drain()
            found += sequences(drained)
            lost += drained.lost
        elif numbers:
            sequence = int(move) % len(numbers)
            end(log, numbers[sequence], sequence)
            ended.add(sequence)
    assert len(found) == len(set(found)) and set(found) <= ended
    open_places = {s for s in range(len(numbers)) if s not in ended and s > len(numbers) - CAPACITY}
    assert len(found) + lost + len(open_places) == len(numbers)


def test_events_that_are_overwritten_while_they_are_copied_are_lost(
    log: RankLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, take = LogReader(path), LogReader._take
    for sequence in range(10):
        write(log, sequence)

    def slow_take(self: LogReader, places: np.ndarray) -> np.ndarray:
        content = take(self, places)
        for sequence in range(10, 20):
            write(log, sequence)
        return content

    with monkeypatch.context() as patched:
        patched.setattr(LogReader, "_take", slow_take)
        drained = reader.drain()
    assert sequences(drained) == [5, 6, 7, 8, 9] and drained.lost == 5
    assert sequences(reader.drain()) == list(range(10, 20))


def test_an_event_that_ends_while_it_is_copied_is_read_the_next_time(
    log: RankLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy may have some of its times only."""
    reader, take = LogReader(path), LogReader._take
    number = begin(log, 1)

    def late_take(self: LogReader, places: np.ndarray) -> np.ndarray:
        end(log, number, 1)
        return take(self, places)

    with monkeypatch.context() as patched:
        patched.setattr(LogReader, "_take", late_take)
        assert sequences(reader.drain()) == []
    assert sequences(reader.drain()) == [1]


def test_readers_do_not_disturb_each_other(log: RankLog, path: Path) -> None:
    readers = [LogReader(path), LogReader(path)]
    write(log, 1)
    assert [sequences(reader.drain()) for reader in (*readers, readers[0])] == [[1], [1], []]


def test_texts_that_no_longer_fit(log: RankLog, path: Path) -> None:
    for number in range(TEXTS + 5):
        log.write_activity(f"name {number}", 1, 0.0, 1.0, 0.0)
    reader = LogReader(path)
    assert set(reader.drain().events["name"][-5:].tolist()) == {OTHER_TEXT}
    assert len(reader.texts()) == TEXTS


def test_only_this_user_reads_the_file(log: RankLog, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_file_system_is_a_warning_and_leaves_no_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refused)
    assert open_log(IDENTITY, path).path is None
    assert not path.exists() and "No space left" in capsys.readouterr().err


def test_files_that_are_no_log(tmp_path: Path, path: Path) -> None:
    for content in (b"", b"short", bytes(layout.log_bytes(1))):
        path.write_bytes(content)
        with pytest.raises(LogError, match="not a flight record"):
            LogReader(path)
    head = layout.MAGIC.to_bytes(8, "little") + (layout.FORMAT + 1).to_bytes(8, "little")
    path.write_bytes(head + bytes(layout.log_bytes(1)))
    with pytest.raises(LogError, match=f"format {layout.FORMAT + 1}, not {layout.FORMAT}"):
        read_state(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        LogReader(tmp_path / "link")
    with pytest.raises(OSError, match="not a regular file"):
        LogReader(Path("/dev/null"))


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.record.test_log_reader import IDENTITY, open_log, write
log = open_log(IDENTITY, Path(sys.argv[1]), 128)
for sequence in range(100):
    write(log, sequence)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_all_that_a_killed_rank_wrote_is_read(path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == -signal.SIGKILL
    assert sequences(LogReader(path).drain()) == list(range(100))


def test_a_removed_file_is_read_on(log: RankLog, path: Path) -> None:
    reader = LogReader(path)
    write(log, 1)
    path.unlink()
    write(log, 2)
    assert sequences(reader.drain()) == [1, 2] and reader.state().groups["tp.0"].entered == 2
