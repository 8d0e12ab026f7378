"""The live file of a run, `live.json` in its folder: the present state of every rank, written about once a second.

The driver of `megascale launch` or the launcher of `megascale train` writes the file, and a viewer on any host with the
folder reads it. Columns are runs of equal values, so a healthy job of any size takes a kilobyte.

- `LiveState`: the content; `read_live_file`: from a file
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
from typing import Any

from megascale.core.run_folder import check_not_lost
from megascale.record.layout import Phase
from megascale.record.rank_state import RankStatus

LIVE_FILE = "live.json"  # the file's name in the run's folder

FORMAT = 1

EVERY_S = 1.0  # seconds between two writes of a file of ordinary size
MOST_BYTES_PER_S = 64 << 10  # bytes per second beyond which the file is written less often
MOST_BYTES = 16 << 20  # most bytes of a file that a reader takes
MOST_RANKS = 1 << 20  # most ranks of a file that a reader takes

SHOWN_STATES = ("T", "t", "D", "Z", "X")
"""Letters of processes that do not run; whether a process runs or sleeps changes all the time, and tells nothing."""

_COLUMNS = {"phase": str, "step": int, "idle_s": int, "silent_s": int, "state": str}


@dataclass(frozen=True)
class LiveState:
    """The state of a job at `time`, in Unix seconds, with a status of each rank.

    `stage`: of a driver, "" without one. `status`: the job's exit status, None while it runs. `next_s`: seconds until
    the next write. What a reader adds: `source`, "live file" or "flight records", "" for neither; `age_s`, since when
    it is known; `stale`: nobody writes the file any more, and the job has not ended.
    """

    time: float
    attempt: int
    ranks: Sequence[RankStatus]
    stage: str = ""
    status: int | None = None
    next_s: float = EVERY_S
    source: str = ""
    age_s: float = 0.0
    stale: bool = False

    @property
    def step(self) -> int:
        """The newest step of any rank; 0 before the first."""
        return max((rank.step for rank in self.ranks), default=0)

    @property
    def idle_s(self) -> int:
        """Seconds for which no rank has made progress. A rank that is done makes none."""
        return min((int(rank.idle_s) for rank in self.ranks if rank.phase not in ("", Phase.DONE)), default=0)


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
        ranks = state.ranks
        columns: dict[str, list[str] | list[int]] = {
            "phase": [each.phase for each in ranks],
            "step": [each.step for each in ranks],
            "idle_s": [int(each.idle_s) for each in ranks],
            "silent_s": [int(each.silent_s) for each in ranks],
            "state": [each.state if each.state in SHOWN_STATES else "" for each in ranks],
        }
        body = json.dumps(
            {"time": round(state.time, 3), "attempt": state.attempt, "stage": state.stage, "status": state.status}
            | {name: [[value, len(list(run))] for value, run in itertools.groupby(columns[name])] for name in _COLUMNS},
            separators=(",", ":"),
        )
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


def _from_json(data: Mapping[str, Any]) -> LiveState:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}")
    rows = zip(*(_column(data[name], kind) for name, kind in _COLUMNS.items()), strict=False)
    ranks = (
        RankStatus(rank, 0, phase, step, idle_s=idle_s, silent_s=silent_s, state=state)
        for rank, (phase, step, idle_s, silent_s, state) in enumerate(rows)
    )
    status, stage = data["status"], data["stage"]
    if not (isinstance(stage, str) and (status is None or isinstance(status, int))):
        raise TypeError(f"stage {stage!r}, status {status!r}")
    return LiveState(
        float(data["time"]), int(data["attempt"]), tuple(ranks), stage, status, float(data["next_s"]), "live file"
    )


def _column(runs: Iterable[tuple[Any, int]], kind: type) -> list[Any]:
    """Expand the runs of a column. Raises: TypeError, ValueError"""
    column: list[Any] = []
    for value, count in runs:
        if type(value) is not kind or type(count) is not int or not 0 <= count <= MOST_RANKS - len(column):
            raise ValueError(f"{value!r} for {count!r} ranks")
        column += [value] * count
    return column
