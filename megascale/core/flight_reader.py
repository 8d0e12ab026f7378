"""The reader of a flight record's file. A number that cannot be right, in a record cut in the middle of a write, is
left out; no content raises but that of another kind of file.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from megascale.core import flight_layout as layout
from megascale.core.flight_record import FlightEvent, FlightRecord, FlightRecordError, GroupState, RankRuns, Wait
from megascale.core.shared_file import open_for_reading

_HEADER = struct.Struct(f"<{layout.HEADER_BYTES // layout.WORD}q")
_GROUP_NUMBERS = struct.Struct(f"<{layout.GROUP_NUMBERS}q")
_WAIT_KINDS = {layout.ISSUING: "issuing", layout.WAITING: "waiting", layout.DEVICE: "device"}
_NS = 1e9

READ_ATTEMPTS = 20
"""Copies of a record that a reader makes until no write falls into one. The record of a rank that was stopped in the
middle of a write stays as it is, and the last copy counts.
"""


def read_flight_record(path: Path, *, head_only: bool = False) -> FlightRecord:
    """Read the record of a rank, which may be writing, stopped or gone. `head_only`: without totals, groups and events,
    at a tenth of the cost.

    Raises: FlightRecordError if the file is not a record, or its rank has not begun it; OSError
    """
    descriptor = open_for_reading(path)
    try:
        return read_open_record(descriptor, str(path), head_only=head_only)
    finally:
        os.close(descriptor)


def read_open_record(descriptor: int, name: str, *, head_only: bool = False) -> FlightRecord:
    """Read a record as `read_flight_record` does, from an open file, which may have been removed."""
    for _ in range(READ_ATTEMPTS):  # a copy between two writes, if possible
        version = os.pread(descriptor, layout.WORD, layout.VERSION * layout.WORD)
        content = os.pread(descriptor, layout.FILE_BYTES, 0)
        unchanged = version == os.pread(descriptor, layout.WORD, layout.VERSION * layout.WORD)
        if unchanged and not (version and version[0] & 1):
            break
        time.sleep(0)
    return parse_flight_record(content, time.monotonic_ns(), name, head_only=head_only)


def parse_flight_record(content: bytes, read_ns: int, name: str, *, head_only: bool = False) -> FlightRecord:
    """Parse a copy of a record's file, made at `read_ns`. `name`: of the file, for errors.

    Raises: FlightRecordError
    """
    if len(content) < layout.FILE_BYTES or (header := _HEADER.unpack_from(content))[layout.MAGIC_WORD] != layout.MAGIC:
        raise FlightRecordError(f"{name}: not a flight record, or its rank has not begun it")
    if header[layout.FORMAT_WORD] != layout.FORMAT:
        raise FlightRecordError(f"{name}: a flight record of format {header[layout.FORMAT_WORD]}, not {layout.FORMAT}")
    strings = [] if head_only else _strings(content, header[layout.STRING_COUNT])
    rows = 0 if head_only else _bounded(header[layout.GROUP_COUNT], layout.GROUPS)
    groups = [_group(content, index) for index in range(rows)]
    events = [] if head_only else _events(content, groups, strings)
    return FlightRecord(
        run=_text(content, layout.RUN_OFFSET, layout.RUN_BYTES),
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
        totals=_totals(content, 0 if head_only else header[layout.TOTAL_COUNT], strings),
        groups={group.key: group for group in groups},
        wait=_wait(header, groups),
        open=tuple(event for event in events if not event.ended_ns),
        last=tuple(events),
    )


def _bounded(number: int, most: int) -> int:
    return min(max(number, 0), most)


def _text(content: bytes, offset: int, size: int) -> str:
    return content[offset : offset + size].split(b"\0", 1)[0].decode(errors="replace")


def _strings(content: bytes, count: int) -> list[str]:
    starts = range(layout.STRINGS_OFFSET, layout.TOTALS_OFFSET, layout.STRING_BYTES)
    return [_text(content, start, layout.STRING_BYTES) for start in starts[: _bounded(count, layout.STRINGS)]]


def _string(strings: Sequence[str], index: int) -> str:
    return strings[index] if 0 <= index < len(strings) else ""


def _totals(content: bytes, count: int, strings: Sequence[str]) -> dict[str, float]:
    pairs = layout.TOTAL.iter_unpack(content[layout.TOTALS_OFFSET : layout.GROUPS_OFFSET])
    return {_string(strings, name): value for (name, value), _ in zip(pairs, range(count), strict=False)}


def _group(content: bytes, index: int) -> GroupState:
    start = layout.GROUPS_OFFSET + index * layout.GROUP_BYTES
    numbers = _GROUP_NUMBERS.unpack_from(content, start)
    name_start = start + _GROUP_NUMBERS.size
    size = numbers[layout.GROUP_SIZE]
    ranks = RankRuns(_runs(content, name_start + layout.NAME_BYTES))
    return GroupState(
        _text(content, name_start, layout.NAME_BYTES),
        layout.GROUP_KINDS[_bounded(numbers[layout.GROUP_KIND], len(layout.GROUP_KINDS) - 1)],
        ranks if len(ranks) == size else None,
        numbers[layout.GROUP_ENTERED],
        numbers[layout.GROUP_ISSUED],
        numbers[layout.GROUP_COMPLETED],
        numbers[layout.GROUP_PEER],
    )


def _runs(content: bytes, start: int) -> tuple[tuple[int, int, int], ...]:
    places = range(start, start + layout.RUNS_OF_RANKS * layout.RUN_OF_RANKS.size, layout.RUN_OF_RANKS.size)
    runs = (layout.RUN_OF_RANKS.unpack_from(content, place) for place in places)
    return tuple((first, count, max(1, distance)) for first, count, distance in runs if count)


def _wait(header: Sequence[int], groups: Sequence[GroupState]) -> Wait | None:
    if (kind := _WAIT_KINDS.get(header[layout.WAIT_KIND])) is None:
        return None
    index = header[layout.WAIT_GROUP]
    group = groups[index].key if 0 <= index < len(groups) else ""
    return Wait(kind, group, header[layout.WAIT_SEQUENCE], header[layout.WAIT_SINCE])


def _events(content: bytes, groups: Sequence[GroupState], strings: Sequence[str]) -> list[FlightEvent]:
    ring = content[layout.EVENTS_OFFSET : layout.EVENTS_OFFSET + layout.EVENT.size * layout.EVENTS]
    fields = sorted(event for event in layout.EVENT.iter_unpack(ring) if event[0] > 0)
    return [_event(event, groups, strings) for event in fields]


def _event(fields: Sequence[int], groups: Sequence[GroupState], strings: Sequence[str]) -> FlightEvent:
    _, issued, waiting, ended, sequence, size, step, peer, microbatch, chunk, group, name, part, layer = fields
    known = groups[group] if 0 <= group < len(groups) else None
    return FlightEvent(
        known.kind if known else "action", _string(strings, name), known.key if known else "", sequence, peer, step,
        microbatch, chunk, issued, waiting, ended, size, _string(strings, part), layer,
    )  # fmt: skip
