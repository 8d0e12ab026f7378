"""The live file of a run, `live.json` in its folder: the present state of every rank, written about once a second.

The driver of `megascale launch` or the launcher of `megascale train` writes the file, and a viewer on any host with the
folder reads it. Columns are runs of equal values, so a healthy job of any size takes a kilobyte.

- `LiveRank`, `LiveState`: the content; `read_live_file`: from a file
- `LiveFile`: the writer, and how often it may write
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megascale.core.run_folder import check_not_lost
from megascale.record.rank_state import RankState

LIVE_FILE = "live.json"
"""The file's name in the run's folder."""

FORMAT = 1

EVERY_S = 1.0
"""Seconds between two writes of a file of ordinary size."""

MOST_BYTES_PER_S = 64 << 10
"""Bytes per second beyond which the file is written less often."""

MOST_BYTES = 16 << 20
"""Most bytes of a file that a reader takes."""

MOST_RANKS = 1 << 20
"""Most ranks of a file that a reader takes."""


class LiveRank(NamedTuple):
    """The state of a rank.

    `phase`: of `record.layout.Phase`, "" before the rank has begun. `step`: the current step, -1 before the first.
    `idle_s`: whole seconds without progress; `silent_s`: without a heartbeat. `state`: the process's letter in /proc
    if it is stopped (T), waits for a disk (D), or has failed (X); "" otherwise.
    """

    phase: str = ""
    step: int = -1
    idle_s: int = 0
    silent_s: int = 0
    state: str = ""


SHOWN_STATES = ("T", "t", "D", "Z", "X")
"""Letters of processes that do not run; whether a process runs or sleeps changes all the time, and tells nothing."""


def live_rank(state: RankState | None, letter: str) -> LiveRank:
    """Return what the live file says of a rank with this state, or none yet, whose process has a letter in /proc."""
    shown = letter if letter in SHOWN_STATES else ""
    if state is None:
        return LiveRank(state=shown)
    return LiveRank(str(state.phase), state.step, int(state.idle_s), int(state.silent_s), shown)


@dataclass(frozen=True)
class LiveState:
    """The state of a job at `time`, in Unix seconds.

    `stage`: of a driver, "" without one. `status`: the job's exit status, None while it runs. `next_s`: seconds until
    the next write.
    """

    time: float
    attempt: int
    ranks: Sequence[LiveRank]
    stage: str = ""
    status: int | None = None
    next_s: float = EVERY_S


class LiveFile:
    """The writer of a live file. `write` is for a thread: the folder may be on a file server that hangs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._lock = threading.Lock()
        self._must_be_there = False

    def write(self, state: LiveState) -> float:
        """Write a state, and return the seconds until the next write. The file is not flushed to disk: a power cut may
        take it. Raises: OSError
        """
        body = json.dumps(_to_json(state), separators=(",", ":"))
        next_s = max(EVERY_S, len(body) / MOST_BYTES_PER_S)
        with self._lock:
            if self._must_be_there:
                check_not_lost(self._path)
            self._temporary.write_text(f'{{"format":{FORMAT},"next_s":{next_s:.1f},{body[1:]}\n', encoding="ascii")
            self._temporary.replace(self._path)
            self._must_be_there = True
        return next_s


def read_live_file(path: Path) -> LiveState | None:
    """Read a live file; None without one. Raises: ValueError for other content; OSError"""
    try:
        with open(path, "rb") as file:
            text = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(text) > MOST_BYTES:
        raise ValueError(f"{path}: more than {MOST_BYTES} bytes")
    try:
        return _from_json(json.loads(text))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a live file: {type(error).__name__}: {error}") from None


def _to_json(state: LiveState) -> dict[str, Any]:
    plain = {"time": round(state.time, 3), "attempt": state.attempt, "stage": state.stage, "status": state.status}
    columns = zip(*state.ranks, strict=True) if state.ranks else ((),) * len(LiveRank._fields)
    runs = ([[value, len(list(run))] for value, run in itertools.groupby(column)] for column in columns)
    return plain | dict(zip(LiveRank._fields, runs, strict=True))


def _from_json(data: Mapping[str, Any]) -> LiveState:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}")
    columns = [_column(data[name], type(default)) for name, default in LiveRank._field_defaults.items()]
    status, stage = data["status"], data["stage"]
    if not (isinstance(stage, str) and (status is None or isinstance(status, int))):
        raise TypeError(f"stage {stage!r}, status {status!r}")
    return LiveState(
        float(data["time"]),
        int(data["attempt"]),
        tuple(map(LiveRank, *columns)),
        stage,
        status,
        float(data["next_s"]),
    )


def _column(runs: Iterable[tuple[Any, int]], kind: type) -> list[Any]:
    """Expand the runs of a column. Raises: TypeError, ValueError"""
    column: list[Any] = []
    for value, count in runs:
        if type(value) is not kind or type(count) is not int or not 0 <= count <= MOST_RANKS - len(column):
            raise ValueError(f"{value!r} for {count!r} ranks")
        column += [value] * count
    return column
