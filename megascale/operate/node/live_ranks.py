"""The live file of a job whose ranks the local launcher has started: written by a thread, from their flight records."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megascale.core.errors import Exit
from megascale.core.process import process_state
from megascale.operate.node.workers import Worker
from megascale.record.layout import Phase
from megascale.record.live_file import EVERY_S, LiveFile, LiveRank, LiveState, live_rank
from megascale.record.log_reader import read_state
from megascale.record.rank_state import LogError

JOIN_S = 1.0
"""Seconds that the end of the job waits for a file server."""

_IN_ORDER = (Exit.OK, Exit.STOPPED)
"""Exit statuses of ranks that have not failed."""


@dataclass
class LiveJob:
    """The job as the launcher's thread sees it. `status`: of the job, set at its end."""

    workers: Sequence[Worker]
    records: Mapping[int, Path]
    status: int | None = None
    attempt: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def state(self) -> LiveState:
        """Return the present state of all ranks."""
        ranks = tuple(self._rank(worker) for worker in self.workers)
        return LiveState(time.time(), self.attempt, ranks, status=self.status)

    def _rank(self, worker: Worker) -> LiveRank:
        record = None
        with contextlib.suppress(OSError, LogError):
            record = read_state(self.records[worker.rank], head_only=True)
            self.attempt = record.attempt
        rank = live_rank(record, _state(worker))
        if worker.end is not None and worker.end.status in _IN_ORDER:
            return rank._replace(phase=str(Phase.DONE))
        return rank


def _state(worker: Worker) -> str:
    if worker.end is not None:
        return "" if worker.end.status in _IN_ORDER else "X"
    try:
        return process_state(worker.process.pid)
    except OSError:
        return ""


@contextlib.contextmanager
def live_file(
    path: Path, workers: Sequence[Worker], records: Mapping[int, Path], say: Callable[[str], None]
) -> Iterator[LiveJob]:
    """Write the live file while the block runs, and once more with the job's status that the block has set."""
    job = LiveJob(workers, records)
    thread = threading.Thread(target=_write, args=(LiveFile(path), job, say), name="live file", daemon=True)
    thread.start()
    try:
        yield job
    finally:
        job.status = Exit.UNCLASSIFIED if job.status is None else job.status
        job.ended.set()
        thread.join(JOIN_S)


def _write(file: LiveFile, job: LiveJob, say: Callable[[str], None]) -> None:
    fails = False
    while True:
        last, pause_s = job.ended.is_set(), EVERY_S
        try:
            pause_s = file.write(job.state())
            fails = False
        except OSError as error:  # the job is more important than its picture
            if not fails:
                say(f"megascale: WARNING: the live file cannot be written: {error.strerror or error}")
            fails = True
        if last:
            return
        job.ended.wait(pause_s)
