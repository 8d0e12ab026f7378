"""The rank's handle of its writer process (`writer.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megascale.checkpoint.collective_errors import OtherRankError
from megascale.core.errors import CheckpointError
from megascale.core.limits import os_error_hint
from megascale.core.process import blocking_stops, module_command, process_state
from megascale.core.storage import WRITE_HINT

PEER_HINT = "does that rank's writer run, is its host up, with memory to spare, and the network to it?"
"""Hint for an in-memory copy that another host has not received."""

STOPPED_S = 2.0
"""Seconds without a response after which a writer that is stopped by a signal is replaced: other ranks wait for it."""

CONTINUED_S = 0.1  # seconds in which all processes of a job that was stopped as a whole go on


class WriterProcess:
    """A writer process that inherits `descriptors` and serves one request at a time. One that has ended, or is stopped
    by a signal, is replaced.

    With `receiver_args`, the arguments of `replication.serve_replicas`, it also receives replicas of other ranks. The
    process has its own session: signals to the job's ranks do not reach the writer, which ends with this process.
    """

    def __init__(self, descriptors: Sequence[int], receiver_args: Mapping[str, Any] | None = None) -> None:
        self._descriptors = tuple(descriptors)
        self._receiver_args = receiver_args
        self._response = b""
        self._start_error: OSError | None = None
        self._was_stopped = False
        try:
            self._start()
        except OSError as error:
            raise _cannot_start(error) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, request: Mapping[str, Any]) -> None:
        """Send a request of `writer.execute` to the writer; replace an ended writer first.

        Errors are raised by `response`.
        """
        self._response, self._start_error = b"", None
        try:
            if self._process.poll() is not None:
                ended = self._end()
                self._start()
                with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                    print(f"WARNING: {ended}; another one has been started", file=sys.stderr, flush=True)
        except OSError as error:
            self._start_error = error
            return
        self._asked_s = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # the writer has ended: `response` says how
            self._send(request)

    def response(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """Return the response to the request; None if there is none after `wait_s` seconds.

        Raises: CheckpointError if the request failed, or the writer exited or could not be started
        """
        if self._start_error:
            raise _cannot_start(self._start_error)
        until = time.monotonic() + wait_s
        while not self._response.endswith(b"\n"):
            left_s = max(0.0, until - time.monotonic())
            if self._answers.poll(1000 * min(left_s, STOPPED_S)):
                if not (part := os.read(self._stdout, 1 << 16)):
                    ended = CheckpointError(self._end())
                    with contextlib.suppress(OSError):  # another one takes copies of other ranks at once, or is tried
                        self._start()
                    raise ended
                self._response += part
            elif not self._end_if_stopped() and not left_s:
                return None
        response: dict[str, Any] = json.loads(self._response)
        if "error" in response:
            error, hint = (OtherRankError, PEER_HINT) if response["replication"] else (CheckpointError, WRITE_HINT)
            raise error(f"cannot write {response['path']}: {response['error']}", hint=hint)
        return response

    def _start(self) -> None:
        with blocking_stops():
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                module_command("megascale.checkpoint.save.writer", str(os.getpid())),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=self._descriptors, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._takes, self._answers = select.poll(), select.poll()
        self._takes.register(self._stdin, select.POLLOUT)
        self._answers.register(self._stdout, select.POLLIN)
        self._asked_s, self._was_stopped = time.monotonic(), False
        self._send(self._receiver_args)

    def _send(self, message: Any) -> None:
        """Send a message in parts that the pipe has room for: a writer that is stopped reads none."""
        line = json.dumps(message).encode() + b"\n"
        for at in range(0, len(line), select.PIPE_BUF):
            while not self._takes.poll(1000 * STOPPED_S):
                self._end_if_stopped()
            os.write(self._stdin, line[at : at + select.PIPE_BUF])

    def _end_if_stopped(self) -> bool:
        """Kill a writer that has not answered for STOPPED_S and is stopped by a signal; return True if it was."""
        if time.monotonic() - self._asked_s >= STOPPED_S and self._is_stopped():
            time.sleep(CONTINUED_S)
            if self._is_stopped():
                self._was_stopped = True
                self._process.kill()
        return self._was_stopped

    def _is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            return process_state(self._process.pid) == "T"
        return False

    def _end(self) -> str:
        status = self._process.wait()
        how = f"has ended: signal {-status}" if status < 0 else f"has ended: status {status}"
        if self._was_stopped:
            how = f"was stopped by a signal, did not answer for {STOPPED_S:g} s, and was killed"
        return f"the process that writes checkpoints {how}"


def _cannot_start(error: OSError) -> CheckpointError:
    what = f"the process that writes checkpoints cannot be started: {error.strerror}"
    return CheckpointError(what, hint=os_error_hint(error, "the host's memory, and its limit of processes"))
