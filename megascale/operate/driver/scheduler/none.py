"""No scheduler: nodes join by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megascale.operate.driver.scheduler.port import AgentEnd, Node


class NoScheduler:
    """`Scheduler` of a job whose agents others start: observers beside the ranks of another launcher, the agent in this
    process, or pods of a JobSet, whose number is the manifest's. A node is excluded by name: the driver turns away an
    agent that joins on it. To keep pods off it, cordon the node.
    """

    async def nodes(self) -> Sequence[Node]:
        return ()

    async def without_agent(self) -> Sequence[str]:
        return ()

    async def start_agent(self, node: str) -> None:
        """Do nothing: Kubernetes restarts the container of an agent that has ended."""

    async def next_end(self) -> AgentEnd:
        """Never return: only missing heartbeats say that an agent ended."""
        return await asyncio.get_running_loop().create_future()

    async def exclude(self, node: str, reason: str, until: float | None) -> None:
        """Do nothing: the driver has told the agent to leave."""

    async def request(self, count: int) -> Sequence[Node]:
        """Return no node: a replacement joins by itself."""
        return ()

    async def release(self, node: str) -> None:
        """Do nothing: nothing is held."""

    async def stop(self, requeue: bool, grace_s: float) -> None:
        """Do nothing: agents leave at the driver's word, and the end of its pod ends a JobSet."""
