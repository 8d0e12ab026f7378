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

from megascale.core.errors import DataError
from megascale.core.limits import os_error_hint
from megascale.core.process import module_command, process_state
from megascale.data.reader_memory import ReaderMemory
from megascale.data.reader_process import ReaderWork

POLL_S = 0.2
"""Seconds between two looks at the reader."""

STOPPED_S = 1.0
"""Seconds for which a reader may be stopped by a signal before it is replaced."""

MOST_ENDS = 4
"""Ends of readers in a row, without a new step between them, after which none is started any more."""

WITHOUT_READER_HINT = 'see its last words above; data.reader = "rank" reads in the ranks'


class ReaderSupervisor:
    """A context manager: the reader's process, which runs in the block."""

    def __init__(self, work: ReaderWork, memory: ReaderMemory) -> None:
        self._work = work
        self._memory = memory
        self._ended = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, name="reader's supervisor", daemon=True)

    @property
    def pid(self) -> int:
        """The present reader's process id."""
        return self._process.pid

    def start(self) -> None:
        """Watch the reader from now on."""
        self._thread.start()

    def close(self) -> None:
        """End the reader."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end_process()

    def _start(self) -> subprocess.Popen[bytes]:
        """Raises: DataError if the process cannot be started"""
        descriptor = self._memory.descriptor
        command = module_command("megascale.data.reader_process", str(descriptor), str(os.getpid()))
        try:  # in a session of its own: Ctrl-C on the terminal is for the ranks, which finish their step
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[descriptor], start_new_session=True)
        except OSError as error:
            what = f"the host's reader cannot be started: {error.strerror}"
            raise DataError(what, hint=os_error_hint(error, 'data.reader = "rank"')) from None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which `_watch` notices
            process.stdin.write(self._work.to_json().encode() + b"\n")
            process.stdin.flush()
        return process

    def _watch(self) -> None:
        """Start a reader in place of one that has ended or was stopped. It ends with this thread, by the kernel."""
        ends, stopped_s, last = 0, 0.0, self._filled()
        while not self._ended.wait(POLL_S):
            stopped_s = stopped_s + POLL_S if self._is_stopped() else 0.0
            if self._process.poll() is None and stopped_s < STOPPED_S:
                continue
            self._process.kill()
            status = self._process.wait()
            ends, last = (1 if (filled := self._filled()) != last else ends + 1), filled
            what = f"the host's reader {'was stopped' if stopped_s else f'has ended with status {status}'}"
            stopped_s = 0.0
            if ends >= MOST_ENDS:
                self._memory.fail(f"{what}, for the {ends}th time at the same step")
                return
            print(f"WARNING: {what}: another one goes on where it was", file=sys.stderr, flush=True)
            self._end_process()
            try:
                self._process = self._start()
            except DataError as error:
                self._memory.fail(str(error))
                return

    def _is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            return process_state(self._process.pid) in "Tt"
        return False

    def _filled(self) -> list[tuple[int, int]]:
        return [self._memory.ring(split).filled for split in range(self._work.memory.splits)]

    def _end_process(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
