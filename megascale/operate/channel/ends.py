"""The two ends of the connection between the driver of a job and the agents of its nodes.

`DriverEnd` and `AgentEnd` are those of a connection in one process and event loop; `driver_server` and `agent_channel`
have those over gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from megascale.operate.channel.messages import AgentMessage, DriverMessage, Hello

Greeting = Callable[[], Sequence[AgentMessage]]
"""Function: return what an agent sends first on each connection, a Hello and what the driver may have missed."""


@dataclass(frozen=True)
class Disconnected:
    """The driver's end's own notice that the connection of a node was lost, or replaced by a new one."""

    reason: str


class DriverEnd:
    """The driver's end. Iterating gives (node, message) of all agents in order of arrival, with Disconnected when a
    connection ends. `most`: messages that wait; then the agents wait, 0 for no limit. `outboxes`: messages to be sent,
    by node.
    """

    def __init__(self, most: int = 0) -> None:
        self.inbox: asyncio.Queue[tuple[str, AgentMessage | Disconnected]] = asyncio.Queue(most)
        self.outboxes: dict[str, asyncio.Queue[DriverMessage]] = {}

    @property
    def agents(self) -> frozenset[str]:
        """The nodes whose agents are connected."""
        return frozenset(self.outboxes)

    def send(self, node: str, message: DriverMessage) -> bool:
        """Send a message to a node's agent, without waiting. Return False if it is not connected."""
        if node not in self.outboxes:
            return False
        self.outboxes[node].put_nowait(message)
        return True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, AgentMessage | Disconnected]:
        return await self.inbox.get()


class AgentEnd:
    """The agent's end. In `async with` it is connected; iterating gives the driver's messages."""

    def __init__(self, driver: DriverEnd, greeting: Greeting) -> None:
        self._messages: asyncio.Queue[DriverMessage] = asyncio.Queue()
        self._driver = driver
        self._greeting = greeting
        self._node = ""

    @property
    def lost_s(self) -> float:
        """Seconds since the connection was lost; 0 while it stands."""
        return 0.0

    async def __aenter__(self) -> Self:
        hello, *more = self._greeting()
        assert isinstance(hello, Hello)
        self._node = hello.node
        self._driver.outboxes[self._node] = self._messages
        for message in (hello, *more):
            self.send(message)
        return self

    async def __aexit__(self, *error: object) -> None:
        del self._driver.outboxes[self._node]
        self._driver.inbox.put_nowait((self._node, Disconnected("the agent has ended")))

    def send(self, message: AgentMessage) -> bool:
        """Send a message, without waiting. Return False while the driver is lost: the message is dropped."""
        self._driver.inbox.put_nowait((self._node, message))
        return True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DriverMessage:
        return await self._messages.get()
