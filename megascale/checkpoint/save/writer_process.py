"""The rank's handle of its writer process (`writer.py`)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from megascale.core.errors import CheckpointError
from megascale.core.limits import os_error_hint
from megascale.core.process import module_command
from megascale.core.storage import WRITE_HINT

HOST_HINT = "is that host up, with memory to spare, and the network to it?"
"""Hint for an in-memory copy that another host has not received."""


class WriterProcess:
    """A writer process that inherits `descriptors` and serves one request at a time.

    With `receiver_args`, the arguments of `replication.serve_replicas`, it also receives replicas of other ranks. The
    process has its own session: signals to the job's ranks do not reach the writer, which ends with this process.
    """

    def __init__(self, descriptors: Sequence[int], receiver_args: Mapping[str, Any] | None = None) -> None:
        self._descriptors = tuple(descriptors)
        self._receiver_args = receiver_args
        self._process: subprocess.Popen[bytes] | None = None
        self._response = b""
        self._start_error: OSError | None = None
        try:
            self._start()
        except OSError as error:
            raise _cannot_start(error) from None

    @property
    def pid(self) -> int:
        """Process id of the writer."""
        assert self._process is not None
        return self._process.pid

    def submit(self, request: Mapping[str, Any]) -> None:
        """Send a request of `writer.execute` to the writer; restart an exited writer first.

        Errors are raised by `response`.
        """
        self._response, self._start_error = b"", None
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
        except OSError as error:
            self._start_error = error
            return
        with contextlib.suppress(BrokenPipeError):  # the writer has exited: `response` says how
            self._send(request)

    def response(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """Return the response to the request; None if there is none after `wait_s` seconds.

        Raises: CheckpointError if the request failed, or the writer exited or could not be started
        """
        if self._start_error:
            raise _cannot_start(self._start_error)
        while not self._response.endswith(b"\n"):
            part = self._read(wait_s)
            if part is None:
                return None
            if not part:
                raise CheckpointError(f"the process that writes checkpoints has ended: {self._exit_reason()}")
            self._response += part
        response: dict[str, Any] = json.loads(self._response)
        if "error" in response:
            what = f"cannot write {response['path']}: {response['error']}"
            raise CheckpointError(what, hint=HOST_HINT if response["replication"] else WRITE_HINT)
        return response

    def _start(self) -> None:
        self._process = subprocess.Popen(
            module_command("megascale.checkpoint.save.writer", str(os.getpid())),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=self._descriptors, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._pipe = self._process.stdout.fileno()
        self._ready = select.poll()
        self._ready.register(self._pipe, select.POLLIN)
        self._send(self._receiver_args)

    def _send(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self, wait_s: float) -> bytes | None:
        if not self._ready.poll(None if wait_s == math.inf else 1000 * wait_s):
            return None
        return os.read(self._pipe, 1 << 16)

    def _exit_reason(self) -> str:
        assert self._process is not None
        status = self._process.wait()
        return f"signal {-status}" if status < 0 else f"status {status}"


def _cannot_start(error: OSError) -> CheckpointError:
    what = f"the process that writes checkpoints cannot be started: {error.strerror}"
    return CheckpointError(what, hint=os_error_hint(error, "the host's memory, and its limit of processes"))
