"""Agents as child processes: started without threads, each in its own session, and waited for by the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from megascale.core.process import die_with_parent
from megascale.operate.driver.scheduler.port import AgentEnd, SchedulerError

LAST_LINES = 20
"""Lines of an agent's output in its `AgentEnd`."""

_LAST_BYTES = 16 << 10


@dataclass
class _Child:
    process: subprocess.Popen
    log: Path
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    expected: bool = False  # killed by this process: no `AgentEnd`

    def signal(self, number: int) -> None:
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class AgentProcesses:
    """The child processes of an adapter, one for each node: an agent, or a client that runs an agent elsewhere.

    A child dies when this process ends for any reason.
    """

    def __init__(self) -> None:
        self._children: dict[str, _Child] = {}
        self._ends: asyncio.Queue[AgentEnd] = asyncio.Queue()

    def pid(self, node: str) -> int | None:
        """Return the process id of a node's running child; None without one."""
        child = self._children.get(node)
        return child.process.pid if child and not child.ended.is_set() else None

    def start(
        self, node: str, command: Sequence[str], env: Mapping[str, str], log: Path, inherited: Sequence[int] = ()
    ) -> None:
        """Start a node's child with its output in `log`. `inherited`: descriptors passed on. Call in the main thread.

        Raises: SchedulerError
        """
        parent = os.getpid()
        try:
            with _open_log(log) as output:
                process = subprocess.Popen(
                    list(command),
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=inherited,
                    start_new_session=True,  # Ctrl-C reaches the supervisor alone
                    preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  no threads here
                )
        except OSError as error:
            what = f"the agent of node {node} cannot be started: {error.strerror}: {error.filename}"
            raise SchedulerError(what) from None
        self._forget_ends(node)
        child = self._children[node] = _Child(process, log)
        on_end(process, lambda: self._on_end(node, child))

    def _forget_ends(self, node: str) -> None:
        """Drop an end that nobody has asked for yet: the node has another child now."""
        for _ in range(self._ends.qsize()):
            if (end := self._ends.get_nowait()).node != node:
                self._ends.put_nowait(end)

    def signal(self, node: str, number: int) -> None:
        """Send a signal to the process group of a node's child."""
        if node in self._children:
            self._children[node].signal(number)

    async def end(self, nodes: Sequence[str], grace: float) -> None:
        """End the children of nodes without an `AgentEnd`: SIGTERM, and SIGKILL after `grace` seconds."""
        running = [child for node in nodes if (child := self._children.get(node)) and not child.ended.is_set()]
        for child in running:
            child.expected = True
        if grace:
            await _signal_and_wait(running, signal.SIGTERM, grace)
        await _signal_and_wait(running, signal.SIGKILL, None)

    async def end_all(self, grace: float) -> None:
        """End all children."""
        await self.end(list(self._children), grace)

    async def next_end(self) -> AgentEnd:
        """Wait for the next end of a child that nobody asked for."""
        return await self._ends.get()

    def _on_end(self, node: str, child: _Child) -> None:
        child.ended.set()
        if not child.expected:
            self._ends.put_nowait(AgentEnd(node, child.process.returncode, last_lines(child.log)))


def _open_log(log: Path) -> BinaryIO:
    """Open the log of an agent; without the run's folder its output is lost, and the agent says what it misses."""
    try:
        return open(log, "ab")
    except OSError:
        return open(os.devnull, "ab")


def on_end(process: subprocess.Popen, call: Callable[[], object]) -> None:
    """Wait for a process in the event loop, then call `call`. asyncio's own watcher would use a thread."""
    loop, descriptor = asyncio.get_running_loop(), os.pidfd_open(process.pid)

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        process.wait()
        call()

    loop.add_reader(descriptor, ended)


async def run(*command: str) -> tuple[int, str]:
    """Run a command and return its exit status and output, errors included. Raises: OSError"""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        ended = asyncio.Event()
        on_end(process, ended.set)
        await ended.wait()
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace").strip()


async def _signal_and_wait(children: Sequence[_Child], number: int, seconds: float | None) -> None:
    for child in children:
        child.signal(number)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(child.ended.wait() for child in children)), seconds)


def last_lines(log: Path, most: int = LAST_LINES) -> tuple[str, ...]:
    """Return the last lines of a log; none if there is no log."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-most:])
    except OSError:
        return ()
