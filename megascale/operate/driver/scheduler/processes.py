"""Agents as child processes: started without threads, each in its own session, and waited for by the event loop.

- `AgentProcesses`: the children; `HeldNodes`: an adapter's nodes, with a child each
- `run`: another command
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from megascale.core.process import die_with_parent
from megascale.operate.driver.scheduler.port import AgentEnd, AgentLaunch, Node, SchedulerError
from megascale.operate.node.threads import call_at_end

LAST_LINES = 20  # lines of an agent's output in its `AgentEnd`

_LAST_BYTES = 16 << 10


@dataclass
class _Child:
    process: subprocess.Popen
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
        for _ in range(self._ends.qsize()):  # of an earlier child: nobody has asked for its end yet
            if (end := self._ends.get_nowait()).node != node:
                self._ends.put_nowait(end)
        child = self._children[node] = _Child(process)

        def take_end() -> None:
            status = process.wait()
            child.ended.set()
            if not child.expected:
                self._ends.put_nowait(AgentEnd(node, status, last_lines(log)))

        call_at_end(process.pid, take_end)

    async def end(self, nodes: Sequence[str], grace: float) -> None:
        """End the children of nodes without an `AgentEnd`: SIGTERM, and SIGKILL after `grace` seconds."""
        running = [child for node in nodes if (child := self._children.get(node)) and not child.ended.is_set()]
        for child in running:
            child.expected = True
        if grace:
            await _signal_and_wait(running, signal.SIGTERM, grace)
        await _signal_and_wait(running, signal.SIGKILL, None)

    async def next_end(self) -> AgentEnd:
        """Wait for the next end of a child that nobody asked for."""
        return await self._ends.get()


class HeldNodes:
    """The part of an adapter that holds nodes, on each of which a child process is or starts its agent. `grace_s`: for
    a child to end; `others`: nodes that the job does not hold, and may get.
    """

    def __init__(self, agent: AgentLaunch, held: Iterable[Node], others: Iterable[Node] = (), grace_s: float = 0.0):
        self._agent = agent
        self._processes = AgentProcesses()
        self._held = {node.name: node for node in held}
        self._others = list(others)
        self._grace_s = grace_s
        self._excluded: dict[str, float] = {}

    async def nodes(self) -> Sequence[Node]:
        return tuple(self._held.values())

    async def without_agent(self) -> Sequence[str]:
        return [node for node in self._held if self._processes.pid(node) is None]

    async def next_end(self) -> AgentEnd:
        return await self._processes.next_end()

    async def exclude(self, node: str, reason: str, until: float | None) -> None:
        self._excluded[node] = float("inf") if until is None else until

    async def release(self, node: str) -> None:
        self._check_held(node)
        await self._end(node)
        self._others.append(self._held.pop(node))

    async def _end(self, node: str) -> None:
        """End what runs on a node."""
        await self._processes.end([node], self._grace_s)

    def _take(self, count: int) -> list[Node]:
        """Hold up to `count` of the other nodes, without those that are excluded now, and return them."""
        new = [node for node in self._others if self._excluded.get(node.name, 0) <= time.time()][:count]
        for node in new:
            self._others.remove(node)
            self._held[node.name] = node
        return new

    def _check_held(self, node: str) -> None:
        if node not in self._held:
            raise SchedulerError(f"the job does not hold node {node}")


def _open_log(log: Path) -> BinaryIO:
    """Open the log of an agent; without the run's folder its output is lost, and the agent says what it misses."""
    try:
        return open(log, "ab")
    except OSError:
        return open(os.devnull, "ab")


async def run(*command: str) -> tuple[int, str]:
    """Run a command and return its exit status and output, errors included. Raises: OSError"""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        ended = asyncio.Event()
        call_at_end(process.pid, ended.set)  # asyncio's own watcher would use a thread
        await ended.wait()
        output.seek(0)
        return process.wait(), output.read().decode(errors="replace").strip()


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
