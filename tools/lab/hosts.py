"""Commands on all hosts of a testbed: any command (`run_on_hosts`), or a job under torchrun (`run_torchrun`)."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lab.testbed import Host, Testbed

TIMEOUT = 600.0
"""Default timeout of commands on the hosts, in seconds."""

SHUTDOWN_TIMEOUT_S = 30.0
"""Seconds that the other hosts' commands have to end after a failure, before they are killed."""

TIMED_OUT = 124
"""Exit status of a command that was killed at the timeout, as with timeout(1)."""

_PORT = "29500"  # free: every host is a new network namespace
_POLL_S = 0.05


@dataclass(frozen=True)
class CommandResult:
    """The end of a command on a host. `status`: exit status, negative for a signal, TIMED_OUT at the timeout.
    `seconds`: time of the end, since the start of all commands.
    """

    status: int
    stdout: str
    stderr: str
    seconds: float


OnLine = Callable[[Host, str, str], object]
"""Function (host, "out" or "err", line): called for every line that a host prints."""


class _Output:
    """The output of a command, in an unnamed file. `on_line` gets every complete line."""

    def __init__(self, on_line: Callable[[str], object]) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._on_line = on_line
        self._emitted_bytes = 0

    def emit_new_lines(self) -> None:
        """Pass new complete lines to `on_line`."""
        new = self._since(self._emitted_bytes)
        complete = new[: new.rfind(b"\n") + 1]
        self._emitted_bytes += len(complete)
        for line in complete.splitlines():
            self._on_line(line.decode(errors="replace"))

    def close(self) -> str:
        """Pass the remaining output to `on_line`, and return the whole output."""
        self.emit_new_lines()
        text = self._since(0)
        self.file.close()
        if rest := text[self._emitted_bytes :]:
            self._on_line(rest.decode(errors="replace"))
        return text.decode(errors="replace")

    def _since(self, start: int) -> bytes:
        fd = self.file.fileno()
        return os.pread(fd, os.fstat(fd).st_size - start, start)  # does not move the command's file position


class _HostCommand:
    """A running command on a host. `status` is None before its end, at `seconds`."""

    def __init__(
        self, testbed: Testbed, host: Host, command: Sequence[str], env: Mapping[str, str], on_line: OnLine
    ) -> None:
        self.out, self.err = (_Output(partial(on_line, host, name)) for name in ("out", "err"))
        self.process = testbed.start_command(host.index, command, env, stdout=self.out.file, stderr=self.err.file)
        self.status: int | None = None
        self.seconds = 0.0

    def poll(self, seconds: float) -> None:
        """Pass on new output, and update `status` and `seconds`."""
        self.out.emit_new_lines()
        self.err.emit_new_lines()
        self.status, self.seconds = self.process.poll(), seconds

    def result(self) -> CommandResult:
        """Close the outputs and return the result of the ended command."""
        return CommandResult(self.status or 0, self.out.close(), self.err.close(), self.seconds)


def run_on_hosts(
    testbed: Testbed,
    command: Callable[[Host], Sequence[str]],
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    on_line: OnLine | None = None,
) -> list[CommandResult]:
    """Run a command on every host and return its result on every host.

    After a failure the other commands have GRACE seconds to end. After `timeout` seconds everything on the hosts is
    killed, and unfinished commands get the status TIMED_OUT. `on_line` is called with every line of output.

    Raises: TestbedError if there is no such command
    """
    start = time.monotonic()
    deadline = timeout
    on_line = on_line or (lambda host, name, line: None)
    commands = [_HostCommand(testbed, host, command(host), env or {}, on_line) for host in testbed.hosts]
    while running := [command for command in commands if command.status is None]:
        time.sleep(_POLL_S)
        seconds = time.monotonic() - start
        for host_command in running:
            host_command.poll(seconds)
            if host_command.status:
                deadline = min(deadline, seconds + SHUTDOWN_TIMEOUT_S)
        if seconds > deadline:
            late = [command for command in running if command.status is None]
            testbed.kill_processes()
            for host_command in late:
                host_command.status = TIMED_OUT if deadline == timeout else -signal.SIGKILL
    return [host_command.result() for host_command in commands]


def run_torchrun(
    testbed: Testbed,
    ranks: int,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    on_line: OnLine | None = None,
) -> list[CommandResult]:
    """Run a job under torchrun: `command`, such as `-m megascale train CONFIG`, as `ranks` processes on every host.

    The other arguments and the results are as for `run_on_hosts`.
    """
    first = testbed.hosts[0].address
    job = ["--nnodes", str(len(testbed.hosts)), "--nproc-per-node", str(ranks)]
    rendezvous = ["--rdzv-backend", "static", "--master-addr", first, "--master-port", _PORT]
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch warns about addresses without names
    env = {name: os.environ.get(name, value) for name, value in defaults.items()} | dict(env or {})
    with tempfile.TemporaryDirectory() as logs:  # torchrun would leave its own folder behind
        launcher = [sys.executable, "-m", "torch.distributed.run", *job, *rendezvous, "--log-dir", logs]
        return run_on_hosts(
            testbed, lambda host: [*launcher, "--node-rank", str(host.index), *command], env, timeout, on_line
        )
