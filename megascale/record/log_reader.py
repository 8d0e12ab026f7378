"""The reader of a rank's log, which needs no help of the rank: it may be writing, stopped or gone.

- `read_state`: the state of a rank, once
- `LogReader`: the state, the loads of experts, and the events since the last call, again and again

A number that cannot be right, in a log cut in the middle of a write, is left out; no content raises but that of another
kind of file.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.record import layout
from megascale.record.rank_state import FlightEvent, GroupState, LogError, RankRuns, RankState, Wait

if TYPE_CHECKING:
    import numpy as np

_HEADER = struct.Struct(f"<{layout.HEADER_BYTES // layout.WORD}q")
_GROUP_NUMBERS = struct.Struct(f"<{layout.GROUP_NUMBERS}q")
_WAIT_KINDS = {layout.ISSUING: "issuing", layout.WAITING: "waiting", layout.DEVICE: "device"}
_NS = 1e9

READ_ATTEMPTS = 20
"""Copies of a head that a reader makes until no write falls into one. The log of a rank that was stopped in the middle
of a write stays as it is, and the last copy counts.
"""

STATE_PLACES = layout.NEWEST + 64
"""Newest places in which a state's events are looked for: activities and steps lie between them."""


def read_state(path: Path, *, head_only: bool = False) -> RankState:
    """Read the state of a rank from its log. `head_only`: without totals, groups and events, at a tenth of the cost.

    Raises: LogError if the file is not a log, or its rank has not begun it; OSError
    """
    return LogReader(path).state(head_only=head_only)


def event_dtype() -> np.dtype:
    """Return the type of a log's events."""
    import numpy as np

    return np.dtype([(name, f"<{kind}") for name, kind in layout.EVENT_FIELDS])


def step_dtype() -> np.dtype:
    """Return the type of a log's steps, which take as many bytes as events."""
    import numpy as np

    return np.dtype([(name, f"<{kind}") for name, kind in layout.STEP_FIELDS])


@dataclass(frozen=True)
class Drained:
    """Events that have ended since the last call, in the order of their issue, and steps: arrays of `event_dtype` and
    `step_dtype`. `lost`: events that were overwritten before they were read.
    """

    events: np.ndarray
    steps: np.ndarray
    lost: int


class LogReader:
    """Reads a log in a file, also after the file was removed, or in this process's own memory.

    Raises: OSError; LogError
    """

    def __init__(self, log: Path | mmap.mmap) -> None:
        self._name = str(log) if isinstance(log, Path) else "memory"
        self._memory = _map(log) if isinstance(log, Path) else log
        if self._word(layout.MAGIC_WORD) != layout.MAGIC:
            raise LogError(f"{self._name}: not a flight record, or its rank has not begun it")
        if self._word(layout.FORMAT_WORD) != layout.FORMAT:
            found = self._word(layout.FORMAT_WORD)
            raise LogError(f"{self._name}: a flight record of format {found}, not {layout.FORMAT}")
        self._capacity = max(1, (len(self._memory) - layout.PLACES_OFFSET) // layout.PLACE_BYTES)
        self._next = self._load_version = 0
        self._open: np.ndarray | None = None  # numbers of events that had not ended
        self._places: np.ndarray | None = None

    def _word(self, place: int) -> int:
        return int.from_bytes(self._memory[place * layout.WORD : (place + 1) * layout.WORD], "little", signed=True)

    @property
    def pid(self) -> int:
        """Id of the rank's process."""
        return self._word(layout.PID)

    @property
    def note(self) -> dict[str, Any]:
        """The rank's note for readers, empty without one. Raises: LogError"""
        text = self._memory[layout.NOTE_OFFSET : layout.TEXTS_OFFSET].rstrip(b"\0")
        try:
            return dict(json.loads(text)) if text else {}
        except ValueError:
            raise LogError(f"{self._name}: the note of a flight record is damaged") from None

    def texts(self) -> list[str]:
        """Return the texts in use."""
        return _texts(self._memory[layout.TEXTS_OFFSET : layout.LOADS_OFFSET], self._word(layout.TEXT_COUNT))

    def state(self, *, head_only: bool = False) -> RankState:
        """Return the state as of now. `head_only`: as in `read_state`."""
        end = layout.TOTALS_OFFSET if head_only else layout.LOADS_OFFSET
        newest = b""
        for _ in range(READ_ATTEMPTS):  # a copy between two writes, if possible
            version = self._word(layout.VERSION)
            head = self._memory[:end]
            if not head_only:
                count = self._word(layout.COUNT)
                newest = self._copy(max(0, count - min(STATE_PLACES, self._capacity)), count)
            if version == self._word(layout.VERSION) and not version & 1:
                break
            time.sleep(0)
        return _state(head, newest, time.monotonic_ns())

    def _copy(self, first: int, end: int) -> bytes:
        """Copy the places of events `first` to `end` - 1, counted from 0."""
        if not 0 <= first <= end:
            return b""
        place, number = first % self._capacity, end - first
        before = min(number, self._capacity - place)
        spans = ((place, place + before), (0, number - before))
        ends = [[layout.PLACES_OFFSET + index * layout.PLACE_BYTES for index in span] for span in spans]
        return b"".join(self._memory[start:stop] for start, stop in ends)

    def drain(self) -> Drained:
        """Return the events that have ended, and the steps, since the last call."""
        import numpy as np

        if self._places is None or self._open is None:
            start, self._open = layout.PLACES_OFFSET, np.empty(0, np.int64)
            self._places = np.frombuffer(self._memory, event_dtype(), self._capacity, start)
        count = self._word(layout.COUNT)
        first = max(self._next, count - self._capacity)
        numbers = np.concatenate([self._open, np.arange(first + 1, count + 1)])
        places = (numbers - 1) % self._capacity
        states = self._places["state"][places]  # before the copy: what is in a place is complete if it says so
        found = self._take(places)
        # the event after the newest may be under way, in the place of one that was copied
        whole = (found["number"] == numbers) & (numbers > self._word(layout.COUNT) + 1 - self._capacity)
        ended = whole & ((states == layout.EVENT) | (states == layout.STEP_END))
        self._open = numbers[whole & (states == layout.OPEN)]
        lost = first - self._next + int(len(numbers) - whole.sum())
        self._next = count
        records = found[ended]
        steps = records["state"] == layout.STEP_END
        return Drained(records[~steps], records[steps].view(step_dtype()), lost)

    def expert_loads(self) -> tuple[int, np.ndarray] | None:
        """Return a step, and the loads [layers, experts] of its experts, fp16; None if there are none that are new."""
        import numpy as np

        place = layout.LOADS_OFFSET // layout.WORD
        if self._word(place) == self._load_version:
            return None
        content = self._memory[layout.LOADS_OFFSET : layout.PLACES_OFFSET]
        version, step, layers, experts = layout.LOADS_HEAD.unpack_from(content)
        torn = version & 1 or version != self._word(place)
        if torn or not 0 < layers * experts <= layout.LOADS:
            return None
        self._load_version = version
        return step, np.frombuffer(content, "<f2", layers * experts, layout.LOADS_HEAD.size).reshape(layers, experts)

    def _take(self, places: np.ndarray) -> np.ndarray:
        assert self._places is not None
        return self._places[places]


def _map(path: Path) -> mmap.mmap:
    """Map a regular file, not a link, for reading. Raises: OSError; LogError if it is shorter than a log"""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path}: not a regular file")
        if status.st_size < layout.log_bytes(1):
            raise LogError(f"{path}: not a flight record, or its rank has not begun it")
        return mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _state(head: bytes, newest: bytes, read_ns: int) -> RankState:
    """Return the state in copies of the head, or of its first part alone, and of the newest places."""
    header = _HEADER.unpack_from(head)
    texts: list[str] = []
    groups: list[GroupState] = []
    totals: dict[str, float] = {}
    if len(head) > layout.TOTALS_OFFSET:
        texts = _texts(head[layout.TEXTS_OFFSET :], header[layout.TEXT_COUNT])
        groups = [_group(head, index) for index in range(_bounded(header[layout.GROUP_COUNT], layout.GROUPS))]
        pairs = layout.TOTAL.iter_unpack(head[layout.TOTALS_OFFSET : layout.GROUPS_OFFSET])
        count = _bounded(header[layout.TOTAL_COUNT], layout.TOTALS)
        totals = {_text_at(texts, name): value for name, value in itertools.islice(pairs, count)}
    wait = None
    if (kind := _WAIT_KINDS.get(header[layout.WAIT_KIND])) is not None:
        index = header[layout.WAIT_GROUP]
        group = groups[index].key if 0 <= index < len(groups) else ""
        wait = Wait(kind, group, header[layout.WAIT_SEQUENCE], header[layout.WAIT_SINCE])
    events = _events(newest, groups, texts)
    ready = header[layout.READY] == 1
    return RankState(
        run=_text(head, layout.RUN_OFFSET, layout.RUN_BYTES),
        rank=header[layout.RANK],
        world=header[layout.WORLD],
        pid=header[layout.PID],
        attempt=header[layout.ATTEMPT],
        start=header[layout.START] / _NS,
        progress=header[layout.VERSION] // 2,
        heartbeat_ns=header[layout.HEARTBEAT],
        updated_ns=header[layout.UPDATED],
        read_ns=read_ns,
        phase=layout.PHASES[_bounded(header[layout.PHASE], len(layout.PHASES) - 1)],
        phase_since_ns=header[layout.PHASE_SINCE],
        step=header[layout.STEP],
        first_step=header[layout.FIRST_STEP],
        folder=header[layout.FOLDER],
        exit_status=header[layout.EXIT_STATUS] - 1 if header[layout.EXIT_STATUS] > 0 else None,
        step_time_s=header[layout.STEP_TIME] / _NS,
        totals=totals,
        groups={group.key: group for group in groups},
        wait=wait,
        open=tuple(event for event in events if not event.ended_ns),
        last=tuple(events),
        stored_attempt=header[layout.STORED_ATTEMPT] if ready else None,
        epoch_ns=header[layout.EPOCH] if ready else 0,
        coord={axis: header[place] for axis, place in layout.COORDINATES.items()} if ready else {},
        peak_flops=header[layout.PEAK_FLOPS] if ready else 0,
    )


def _bounded(number: int, most: int) -> int:
    return min(max(number, 0), most)


def _text(content: bytes, offset: int, size: int) -> str:
    return content[offset : offset + size].split(b"\0", 1)[0].decode(errors="replace")


def _texts(table: bytes, count: int) -> list[str]:
    return [
        _text(table, index * layout.TEXT_BYTES, layout.TEXT_BYTES) for index in range(_bounded(count, layout.TEXTS))
    ]


def _text_at(texts: Sequence[str], index: int) -> str:
    return texts[index] if 0 <= index < len(texts) else ""


def _group(head: bytes, index: int) -> GroupState:
    start = layout.GROUPS_OFFSET + index * layout.GROUP_BYTES
    numbers = _GROUP_NUMBERS.unpack_from(head, start)
    name_start = start + _GROUP_NUMBERS.size
    first_run = name_start + layout.NAME_BYTES
    places = range(first_run, first_run + layout.RUNS_OF_RANKS * layout.RUN_OF_RANKS.size, layout.RUN_OF_RANKS.size)
    runs = (layout.RUN_OF_RANKS.unpack_from(head, place) for place in places)
    ranks = RankRuns(tuple((first, count, max(1, distance)) for first, count, distance in runs if count))
    return GroupState(
        _text(head, name_start, layout.NAME_BYTES),
        layout.GROUP_KINDS[_bounded(numbers[layout.GROUP_KIND], len(layout.GROUP_KINDS) - 1)],
        ranks if len(ranks) == numbers[layout.GROUP_SIZE] else None,
        numbers[layout.GROUP_ENTERED],
        numbers[layout.GROUP_ISSUED],
        numbers[layout.GROUP_COMPLETED],
        numbers[layout.GROUP_PEER],
    )


def _events(newest: bytes, groups: Sequence[GroupState], texts: Sequence[str]) -> list[FlightEvent]:
    """Return the newest actions and communications in copied places, in the order of their issue."""
    places = layout.EVENT_STRUCT.iter_unpack(newest)
    fields = sorted(place for place in places if place[0] > 0 and place[-1] != layout.STEP_END)
    found = []
    for each in [each for each in fields if each[17] != layout.ACTIVITY][-layout.NEWEST :]:
        _, issued, waiting, ended, order, _, size, _, _, _, _, step, microbatch, peer, layer, _, chunk, row = each[:18]
        known = groups[row] if 0 <= row < len(groups) else None
        name, part = each[19:21]
        found.append(FlightEvent(
            known.kind if known else "action", _text_at(texts, name), known.key if known else "", order, peer, step,
            microbatch, chunk, issued, waiting, ended, size, _text_at(texts, part), layer,
        ))  # fmt: skip
    return found
