"""The two ends of the connection between the driver of a job and the agents of its nodes.

- `DriverEnd`, `AgentEnd`: what both ask of a connection; over gRPC `driver_server` and `agent_channel` have those
- `LocalDriverEnd`: the driver's end of a connection to an agent in the same process and event loop
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from megascale.operate.channel.messages import AgentMessage, DriverMessage, Hello

Greeting = Callable[[], Sequence[AgentMessage]]
"""Function: return what an agent sends first on each connection, a Hello and what the driver may have missed."""


@dataclass(frozen=True)
class Disconnected:
    """The driver's end's own notice that the connection of a node was lost, or replaced by a new one."""

    reason: str


class DriverEnd(Protocol):
    """The driver's end. Iterating gives (node, message) of all agents, with Disconnected when a connection ends."""

    @property
    def agents(self) -> frozenset[str]:
        """The nodes whose agents are connected."""

    def send(self, node: str, message: DriverMessage) -> bool:
        """Send a message to a node's agent, without waiting. Return False if it is not connected."""

    def __aiter__(self) -> AsyncIterator[tuple[str, AgentMessage | Disconnected]]: ...


class AgentEnd(Protocol):
    """The agent's end. In `async with` it is connected; iterating gives the driver's messages."""

    @property
    def lost_s(self) -> float:
        """Seconds since the connection was lost; 0 while it stands."""

    def send(self, message: AgentMessage) -> bool:
        """Send a message, without waiting. Return False while the driver is lost: the message is dropped."""

    def __aiter__(self) -> AsyncIterator[DriverMessage]: ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LocalDriverEnd:
    """The driver's end of a connection in this process. `connect` makes the end of its one agent."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[tuple[str, AgentMessage | Disconnected]] = asyncio.Queue()
        self.connected: dict[str, LocalAgentEnd] = {}

    def connect(self, greeting: Greeting) -> LocalAgentEnd:
        """Return the end of an agent."""
        return LocalAgentEnd(self, greeting)

    @property
    def agents(self) -> frozenset[str]:
        """The node whose agent is connected."""
        return frozenset(self.connected)

    def send(self, node: str, message: DriverMessage) -> bool:
        """Send a message to the agent."""
        if node not in self.connected:
            return False
        self.connected[node].inbox.put_nowait(message)
        return True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, AgentMessage | Disconnected]:
        return await self.inbox.get()


class LocalAgentEnd:
    """The agent's end of a connection in this process, which stands as long as the `async with` block runs."""

    lost_s = 0.0

    def __init__(self, driver: LocalDriverEnd, greeting: Greeting) -> None:
        self.inbox: asyncio.Queue[DriverMessage] = asyncio.Queue()
        self._driver = driver
        self._greeting = greeting
        self._node = ""

    async def __aenter__(self) -> Self:
        hello, *more = self._greeting()
        assert isinstance(hello, Hello)
        self._node = hello.node
        self._driver.connected[self._node] = self
        for message in (hello, *more):
            self.send(message)
        return self

    async def __aexit__(self, *error: object) -> None:
        del self._driver.connected[self._node]
        self._driver.inbox.put_nowait((self._node, Disconnected("the agent has ended")))

    def send(self, message: AgentMessage) -> bool:
        """Send a message to the driver."""
        self._driver.inbox.put_nowait((self._node, message))
        return True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DriverMessage:
        return await self.inbox.get()
