"""The event ring: every record comes back once, or is counted as lost."""

from __future__ import annotations

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

from megascale.core import event_ring
from megascale.core.event_ring import (
    NO_COMMUNICATION,
    OTHER_STRING,
    STRINGS,
    EventRing,
    RingIdentity,
    StepRow,
    event_ring_path,
    open_event_ring,
)
from megascale.core.event_ring_reader import EVENT_FIELDS, STEP_FIELDS, Drained, EventRingError, EventRingReader
from megascale.core.label import Label

IDENTITY = RingIdentity(rank=3, world=8, attempt=2, note={"url": "/runs/ä", "interval_s": 1.5})
CAPACITY = 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-3.events"


@pytest.fixture
def ring(path: Path) -> EventRing:
    return open_event_ring(path, IDENTITY, CAPACITY)


def write(ring: EventRing, sequence: int) -> None:
    """Write an event whose fields all follow from its sequence number."""
    times = (sequence + 0.25, sequence + 0.5, sequence + 0.75, 0.125)
    label = Label("qkv", sequence % 7, sequence % 5, "forward")
    ring.write_event("tp", "all_gather", label, (sequence, 1, 2), ("tp.0", sequence, 5, 8 * sequence), times)


def sequences(drained: Drained) -> list[int]:
    """The sequence numbers of events, which are whole."""
    events = drained.events
    assert (events["step"] == events["sequence"]).all() and (events["bytes"] == 8 * events["sequence"]).all()
    assert (events["end"] == events["sequence"] + 0.75).all()
    return events["sequence"].tolist()


def test_records_have_the_size_of_their_fields() -> None:
    for fields in (EVENT_FIELDS, STEP_FIELDS):
        assert np.dtype(list(fields)).itemsize == event_ring.RECORD_BYTES == event_ring.STEP.size
        assert np.dtype(list(fields)).fields["kind"][1] == 84


def test_an_event_comes_back(ring: EventRing, path: Path) -> None:
    write(ring, 9)
    reader = EventRingReader(path)
    drained, strings = reader.drain(), reader.strings()
    [event] = drained.events
    assert [event[name] for name in ("issue", "start", "end", "exposed")] == [9.25, 9.5, 9.75, 0.125]
    assert [event[name] for name in ("step", "chunk", "microbatch", "layer", "stage")] == [9, 1, 2, 2, 4]
    assert [event[name] for name in ("sequence", "peer", "bytes")] == [9, 5, 72]
    texts = [strings[event[name]] for name in ("axis", "name", "part", "group_name", "direction")]
    assert texts == ["tp", "all_gather", "qkv", "tp.0", "forward"]
    assert not len(drained.steps) and drained.lost == 0


def test_a_step_comes_back(ring: EventRing, path: Path) -> None:
    row = StepRow(7, 1.0, 3.5, 2.0, 0b101, 2.25, float("nan"), 4096, 1e15, 1 << 33)
    ring.write_step(row)
    [step] = EventRingReader(path).drain().steps
    names = ("step", "start", "end", "train", "tags", "loss", "tokens", "flops", "peak_memory")
    assert [step[name] for name in names] == [getattr(row, name) for name in names]
    assert np.isnan(step["grad_norm"])


def test_the_head_and_the_note(ring: EventRing, path: Path) -> None:
    reader = EventRingReader(path)
    head = reader.head
    assert (head.rank, head.world, head.attempt, head.pid, head.ready) == (3, 8, 2, os.getpid(), False)
    assert reader.note == dict(IDENTITY.note)
    ring.set_ready(4, 10**18, {"tp": 1, "cp": 0, "dp": 3, "pp": 2}, 9.89e14)
    head = reader.head
    assert (head.attempt, head.epoch_ns, head.ready, head.peak_flops) == (4, 10**18, True, 989 * 10**12)
    assert head.coord == {"tp": 1, "cp": 0, "dp": 3, "pp": 2}


@given(st.lists(st.integers(0, 2 * CAPACITY), max_size=12))
def test_a_record_is_read_once_or_counted_as_lost(written: list[int]) -> None:
    """A reader that comes in time loses at most the place in which the next record may be under way."""
    memory = event_ring.mmap.mmap(-1, event_ring.RECORDS_OFFSET + CAPACITY * event_ring.RECORD_BYTES)
    ring = EventRing(memory, IDENTITY)
    reader = EventRingReader.__new__(EventRingReader)
    reader._memory, reader._capacity, reader._next = memory, CAPACITY, 0
    total = 0
    for count in written:
        for sequence in range(total, total + count):
            write(ring, sequence)
        total += count
        drained = reader.drain()
        kept = min(count, CAPACITY - 1) if count >= CAPACITY else count
        assert sequences(drained) == list(range(total - kept, total))
        assert drained.lost == count - kept


def test_records_that_are_overwritten_while_they_are_copied_are_lost(
    ring: EventRing, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, copy = EventRingReader(path), EventRingReader._copy
    for sequence in range(10):
        write(ring, sequence)

    def slow_copy(self: EventRingReader, first: int, end: int) -> bytes:
        content = copy(self, first, end)
        for sequence in range(10, 20):
            write(ring, sequence)
        return content

    with monkeypatch.context() as patched:
        patched.setattr(EventRingReader, "_copy", slow_copy)
        drained = reader.drain()
    assert sequences(drained) == [5, 6, 7, 8, 9] and drained.lost == 5
    assert sequences(reader.drain()) == list(range(10, 20))


def test_readers_do_not_disturb_each_other(ring: EventRing, path: Path) -> None:
    readers = [EventRingReader(path), EventRingReader(path)]
    write(ring, 1)
    assert [sequences(reader.drain()) for reader in (*readers, readers[0])] == [[1], [1], []]


def test_strings_that_no_longer_fit(ring: EventRing, path: Path) -> None:
    for number in range(STRINGS + 5):
        ring.write_event("tp", f"name {number}", Label(), (1, -1, -1), NO_COMMUNICATION, (0.0, 0.0, 0.0, 0.0))
    reader = EventRingReader(path)
    assert set(reader.drain().events["name"][-5:].tolist()) == {OTHER_STRING}
    assert len(reader.strings()) == STRINGS


def test_only_this_user_reads_the_file(ring: EventRing, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_file_system_is_an_error_and_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refused)
    with pytest.raises(OSError, match="No space"):
        open_event_ring(path, IDENTITY)
    assert not path.exists()


def test_files_that_are_no_ring(tmp_path: Path, path: Path) -> None:
    path.write_bytes(bytes(1 << 20))
    with pytest.raises(EventRingError, match="not an event ring"):
        EventRingReader(path)
    path.write_bytes(b"short")
    with pytest.raises(EventRingError, match="not an event ring"):
        EventRingReader(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError):
        EventRingReader(tmp_path / "link")


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.core.test_event_ring import IDENTITY, open_event_ring, write
ring = open_event_ring(Path(sys.argv[1]), IDENTITY)
for sequence in range(100):
    write(ring, sequence)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_all_that_a_killed_rank_wrote_is_read(path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == -signal.SIGKILL
    assert sequences(EventRingReader(path).drain()) == list(range(100))


def test_a_removed_file_is_read_on(ring: EventRing, path: Path) -> None:
    reader = EventRingReader(path)
    write(ring, 1)
    path.unlink()
    write(ring, 2)
    assert sequences(reader.drain()) == [1, 2]


def test_the_path_is_beside_the_flight_record() -> None:
    assert event_ring_path(Path("/dev/shm/megascale-0-a.b-7-00003.flight")).name == "megascale-0-a.b-7-00003.events"
