"""The files of ranks' logs on a host: who makes them, and who removes them.

- `log_of_rank`: for this process; `remove_log`, `remove_left_logs`: of ranks that have ended
- `local_states`, `process_states`: from outside
- `log_path`, `find_logs`: where they are; `folder_key`: a number that tells runs of one name apart
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megascale.core.env_numbers import whole_number
from megascale.core.files import SHARED_MEMORY, is_folder
from megascale.core.process import cpu_seconds, process_exists, process_state
from megascale.core.rank import Rank
from megascale.record.layout import CAPACITY, SMALL_CAPACITY
from megascale.record.log import LogIdentity, RankLog, open_log
from megascale.record.log_reader import LogReader, read_state
from megascale.record.rank_state import SILENT_S, LogError, RankState

FLIGHT_RECORD_VARIABLE = "MEGASCALE_FLIGHT_RECORD"
"""Environment variable of a rank: the path of its log. The launcher or agent sets it and removes the file."""

ATTEMPT_VARIABLE = "MEGASCALE_ATTEMPT"
"""Environment variable of a rank: the number of the job's present attempt, from 0."""

LOOK_S = 0.25  # seconds between two looks at the CPU time of a process


def folder_key(folder: Path) -> int:
    """Return a number of 63 bits for a run's folder, which need not exist: the same for all its paths on a host."""
    path = os.path.realpath(folder)
    return int.from_bytes(hashlib.blake2b(os.fsencode(path), digest_size=8).digest(), "little") >> 1


def log_path(run: str, start_ns: int, rank: int) -> Path:
    """Return the path of a rank's log in shared memory. `start_ns`: of the job's attempt, since 1970."""
    name = "".join(char if char.isalnum() or char in "-_." else "_" for char in run)[:100]
    return SHARED_MEMORY / f"megascale-{os.geteuid()}-{name}-{start_ns}-{rank:05d}.flight"


def find_logs(run: str, nodes: str = "") -> Iterator[Path]:
    """Yield the logs of runs of this name on this host, and of runs whose names go on after a "-". `nodes`: "*" for
    those of all nodes of an agent, of which several may share a host.
    """
    pattern = log_path(run, 0, 0)
    return pattern.parent.glob(pattern.name.replace("-0-00000.", f"{nodes}-*-*."))


@contextlib.contextmanager
def log_of_rank(
    folder: Path, rank: Rank, env: Mapping[str, str] = os.environ, *, note: Mapping[str, Any] | None = None,
    collected: bool = False,
) -> Iterator[RankLog]:  # fmt: skip
    """Begin this process's log, in the file that its launcher or agent names in the environment. `folder`: of the run;
    `note`: of `LogIdentity`.

    Under another launcher (torchrun, srun) the rank names the file itself, removes it at its end in order unless it is
    `collected`, whose collector removes it, and leaves it after an error, for others to read; the next rank of the run
    on this host removes it.
    """
    named = env.get(FLIGHT_RECORD_VARIABLE)
    path = Path(named) if named else None
    if path is None and is_folder(SHARED_MEMORY, optional=True):
        remove_left_logs(folder.name)
        path = log_path(folder.name, time.time_ns(), rank.rank)
    attempt = whole_number(env, ATTEMPT_VARIABLE)
    identity = LogIdentity(folder.name, rank.rank, rank.world_size, attempt, folder_key(folder), note or {})
    yield open_log(identity, path, CAPACITY if note else SMALL_CAPACITY)
    if path is not None and not named and not collected:
        path.unlink(missing_ok=True)


def remove_log(path: Path) -> None:
    """Remove a log, if it is there."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def remove_left_logs(run: str, nodes: str = "") -> None:
    """Remove the logs of a run of this name, on this host, whose processes have ended, and kill the children of these.
    `nodes`: as in `find_logs`.
    """
    for path in find_logs(run, nodes):
        with contextlib.suppress(OSError, LogError):
            if not process_exists(LogReader(path).pid):
                path.unlink()
                _kill_children(path)


def _kill_children(log: Path) -> None:
    """Kill the children of a rank that has died with its launcher: their environment names its log."""
    mark = f"{FLIGHT_RECORD_VARIABLE}={log}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def process_states(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return the letters in /proc of the states of ranks' processes, by rank, without processes that are gone.

    The letter is the first thread's. A rank without heartbeats that sleeps by it is running, "R", if its threads use a
    tenth of a core during LOOK_S.
    """
    letters = {}
    for rank, state in states.items():
        with contextlib.suppress(OSError):
            letters[rank] = process_state(state.pid)
    silent = [rank for rank, letter in letters.items() if letter == "S" and states[rank].silent_s > SILENT_S]
    before = {rank: cpu_seconds(states[rank].pid) for rank in silent}
    time.sleep(LOOK_S if silent else 0.0)
    for rank in silent:
        if cpu_seconds(states[rank].pid) - before[rank] > LOOK_S / 10:
            letters[rank] = "R"
    return letters


def local_states(folder: Path) -> dict[int, RankState]:
    """Return the states of the ranks of a run that live on this host, by rank: the newest of each."""
    key, found = folder_key(folder), dict[int, RankState]()
    for path in SHARED_MEMORY.glob(f"megascale-{os.geteuid()}-*.flight"):
        with contextlib.suppress(OSError, LogError):
            if path.lstat().st_uid != os.geteuid():
                continue
            state = read_state(path)
            if state.folder != key or not 0 <= state.rank < state.world or process_state(state.pid) == "Z":
                continue
            if state.rank not in found or found[state.rank].start < state.start:
                found[state.rank] = state
    return found
