"""The scheduler of an observed job: the nodes are another launcher's, and only the agent of this host is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megascale.fault.scheduler.port import AgentEnd, Node, SchedulerError
from megascale.fault.scheduler.processes import AgentProcesses

STOP_GRACE_S = 5.0
"""Seconds from SIGTERM to SIGKILL for the agent."""


class ObservedHost:
    """`Scheduler` of one node, this host, whose agent runs `command` with its output in `log`. Agents of other hosts
    are started there, and join.
    """

    def __init__(self, node: Node, command: Sequence[str], log: Path) -> None:
        self._node = node
        self._command = command
        self._log = log
        self._processes = AgentProcesses()

    async def nodes(self) -> Sequence[Node]:
        return (self._node,)

    async def start_agent(self, node: str) -> None:
        if node == self._node.name:
            self._processes.start(node, self._command, dict(os.environ), self._log)

    async def next_end(self) -> AgentEnd:
        return await self._processes.next_end()

    async def exclude(self, node: str, reason: str, until: float | None) -> None:
        """Nothing: the node is not ours."""

    async def request(self, count: int) -> Sequence[Node]:
        raise SchedulerError("the nodes of an observed job are another launcher's")

    async def release(self, node: str) -> None:
        """Nothing: the node is not ours."""

    async def stop(self, requeue: bool) -> None:
        await self._processes.end_all(STOP_GRACE_S)
