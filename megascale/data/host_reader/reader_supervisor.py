"""The first rank of a host that reads starts the host's reader, and starts it again where it left off.

This rank, and not the launcher, because ranks also start under torchrun, Slurm and MPI, whose launchers know nothing of
readers; and it is there as long as its host's ranks need samples. The reader ends with it. No torch.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace

from megascale.core.errors import DataError
from megascale.core.limits import os_error_hint
from megascale.core.process import blocking_stops, module_command, process_state, thread_work
from megascale.core.readable import is_url
from megascale.data.host_reader.reader_memory import BEATS, OPENER, ReaderMemory
from megascale.data.host_reader.reader_process import ReaderWork
from megascale.data.read.identity import run_prefixes

POLL_S = 0.2  # seconds between two looks at the reader
STOPPED_S = 1.0  # seconds for which a reader may be stopped by a signal before it is replaced
MOST_ENDS = 4  # ends of readers in a row, without a new step between them, after which none is started any more

MOST_HANGS = 2
"""Readers in a row that hang at a step, after which none is started: another one would wait for the same storage."""

HANGS = "hangs"

START_S = 120.0  # seconds in which a reader must have begun, if `data.reader_timeout_s` is not longer

OPENING_S = 3600.0
"""Longest time in which a reader may open datasets for a sample, such as build an index, while its thread works."""

END_S = 5.0  # seconds for which the end of a killed reader is waited for

WITHOUT_READER_HINT = 'see its last words above, and the storage; data.reader = "rank" reads in the ranks'


@dataclass(frozen=True)
class _Pulse:
    """The `beats` of a split's reader, unchanged since `beaten_s`, and the `work` of its thread as it opens datasets.
    Neither has changed since `since_s`, which may be so for `limit_s`.
    """

    beats: int
    beaten_s: float
    since_s: float
    limit_s: float
    work: tuple[int, ...] = ()


class ReaderSupervisor:
    """Keeps a reader's process from its construction until `close`; replaces it once it is watched (`start`)."""

    def __init__(self, work: ReaderWork, memory: ReaderMemory) -> None:
        self._work = work
        self._memory = memory
        self._rings = [memory.ring(split) for split in range(work.memory.splits)]
        self._ended = threading.Event()
        self._stopped_s = 0.0
        data = next(iter(work.specs.values())).data
        remote = any(map(is_url, run_prefixes(data)))
        self._timeout_s = data.reader_timeout_s + (data.retry_timeout_s if remote else 0.0)
        self._pulses: list[_Pulse] = []
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, name="reader's supervisor", daemon=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end_process()

    def _start(self) -> subprocess.Popen[bytes]:
        """Raises: DataError if the process cannot be started"""
        self._stopped_s, now, limit_s = 0.0, time.monotonic(), max(START_S, self._timeout_s)
        self._pulses = [_Pulse(ring.get(BEATS), now, now, limit_s) for ring in self._rings]
        descriptor = self._memory.descriptor
        command = module_command("megascale.data.host_reader.reader_process", str(descriptor), str(os.getpid()))
        try:  # in a session of its own: Ctrl-C on the terminal is for the ranks, which finish their step
            with blocking_stops():
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, pass_fds=[descriptor], start_new_session=True
                )
        except OSError as error:
            what = f"the host's reader cannot be started: {error.strerror}"
            raise DataError(what, hint=os_error_hint(error, 'data.reader = "rank"')) from None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which `_watch` notices
            process.stdin.write(self._work.to_json() + b"\n")
            process.stdin.flush()
        return process

    def _watch(self) -> None:
        """Start a reader in place of one that has ended, was stopped or hangs, and tell the ranks if that fails, which
        would wait without end. The kernel ends the reader with this thread.
        """
        try:
            self._keep_reader()
        except Exception as error:
            self._memory.fail(f"the supervisor of the host's reader has failed: {type(error).__name__}: {error}")
            raise

    def _keep_reader(self) -> None:
        faults, last = 0, [ring.filled for ring in self._rings]
        while not self._ended.wait(POLL_S):
            if not (fault := self._fault()):
                continue
            filled = [ring.filled for ring in self._rings]
            faults, last = (1 if filled != last else faults + 1), filled
            what = f"the host's reader {fault}"
            self._end_process()
            if faults >= (MOST_HANGS if fault.startswith(HANGS) else MOST_ENDS):
                self._memory.fail(f"{what}, {faults} times at the same step")
                return
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                print(f"WARNING: {what}: another one goes on where it was", file=sys.stderr, flush=True)
            try:
                self._process = self._start()
            except DataError as error:
                self._memory.fail(str(error))
                return

    def _fault(self) -> str:
        """Say what is wrong with the reader; "" if nothing is."""
        if (status := self._process.poll()) is not None:
            return f"has ended with status {status}"
        with contextlib.suppress(OSError):
            stopped = process_state(self._process.pid) in "Tt"
            self._stopped_s = self._stopped_s + POLL_S if stopped else 0.0
        if self._stopped_s >= STOPPED_S:
            return "was stopped"
        if (split := self._hanging_split()) is not None:
            return f"{HANGS} as it reads {self._rings[split].reading or 'no sample yet'}"
        return ""

    def _hanging_split(self) -> int | None:
        """The split of which the reader has not beaten for too long, nor its thread worked; None if all do."""
        now = time.monotonic()
        for split, (ring, before) in enumerate(zip(self._rings, self._pulses, strict=True)):
            beats, thread = ring.get(BEATS), ring.get(OPENER)
            opens = thread and now - before.beaten_s < OPENING_S
            work = thread_work(self._process.pid, thread) if opens else before.work
            if beats != before.beats:
                self._pulses[split] = _Pulse(beats, now, now, self._timeout_s, work)
            elif work != before.work:
                self._pulses[split] = replace(before, since_s=now, work=work)
            elif now - before.since_s > before.limit_s:
                return split
        return None

    def _end_process(self) -> None:
        """Kill the reader. One that hangs in the kernel ends when storage answers, before it can write anything."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
