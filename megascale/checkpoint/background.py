"""The rank's side of the process that writes its checkpoints (`checkpoint.writer`)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megascale.checkpoint.storage import WRITABLE
from megascale.core.errors import CheckpointError


class Background:
    """The process, which inherits `descriptors`; one order at a time. With `receive`, what `copies.receive` takes, it
    takes copies from others as well.

    It has a session of its own: what stops the ranks of a job does not stop it, and it ends with this process.
    """

    def __init__(self, descriptors: Sequence[int], receive: Mapping[str, Any] | None = None) -> None:
        self._descriptors = tuple(descriptors)
        self._receive = receive
        self._process: subprocess.Popen[bytes] | None = None
        self._answer = b""
        self._failed: OSError | None = None
        try:
            self._start()
        except OSError as error:
            raise _cannot_start(error) from None

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process is not None
        return self._process.pid

    def order(self, **parts: Mapping[str, Any] | None) -> None:
        """Give it an order (`writer.obey`). If it has ended since the last one there is a new one. What fails `answer`
        says.
        """
        self._answer, self._failed = b"", None
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
        except OSError as error:
            self._failed = error
            return
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._tell(parts)

    def answer(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """What became of the order; None if it is not done, nor after so many seconds of silence.

        Raises: CheckpointError if it could not do it, has ended, or could not be started
        """
        if self._failed:
            raise _cannot_start(self._failed)
        while not self._answer.endswith(b"\n"):
            part = self._read(wait_s)
            if part is None:
                return None
            if not part:
                raise CheckpointError(f"the process that writes checkpoints has ended: {self._status()}")
            self._answer += part
        found: dict[str, Any] = json.loads(self._answer)
        if "error" in found:
            what = f"cannot write {found['what']}: {found['error']}"
            raise CheckpointError(what, mend=WRITABLE)
        return found

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megascale.checkpoint.writer", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=self._descriptors, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._pipe = self._process.stdout.fileno()
        self._ready = select.poll()
        self._ready.register(self._pipe, select.POLLIN)
        self._tell(self._receive)

    def _tell(self, what: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self, wait_s: float) -> bytes | None:
        if not self._ready.poll(None if wait_s == math.inf else 1000 * wait_s):
            return None
        return os.read(self._pipe, 1 << 16)

    def _status(self) -> str:
        assert self._process is not None
        status = self._process.wait()
        return f"signal {-status}" if status < 0 else f"status {status}"


def _cannot_start(error: OSError) -> CheckpointError:
    what = f"the process that writes checkpoints cannot be started: {error.strerror}"
    return CheckpointError(what, mend="look at the host's memory, and how many processes it allows")
