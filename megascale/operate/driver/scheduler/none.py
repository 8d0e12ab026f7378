"""No scheduler: another launcher runs the ranks, and the agents, its observers, join by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megascale.operate.driver.scheduler.port import AgentEnd, Node, SchedulerError


class NoScheduler:
    """The scheduler port (`scheduler.port`) of a job that is only watched."""

    async def nodes(self) -> Sequence[Node]:
        """Return no node: nodes join by themselves."""
        return ()

    async def without_agent(self) -> Sequence[str]:
        """Return no node: observers start by themselves."""
        return ()

    async def start_agent(self, node: str) -> None:
        """Raises: SchedulerError"""
        raise SchedulerError(f"the observer of node {node} is not started from here")

    async def next_end(self) -> AgentEnd:
        """Never return: only missing heartbeats say that an observer ended."""
        return await asyncio.get_running_loop().create_future()

    async def exclude(self, node: str, reason: str, until: float | None) -> None:
        """Nothing is held."""

    async def request(self, count: int) -> Sequence[Node]:
        """Raises: SchedulerError"""
        raise SchedulerError("another launcher holds the nodes")

    async def release(self, node: str) -> None:
        """Nothing is held."""

    async def stop(self, requeue: bool, grace_s: float) -> None:
        """Nothing runs."""
