"""The connection of the agents to the driver: one stream of gRPC for each agent, proved and sealed by the job's secret.

The agent sends the first message of `channel.handshake` as metadata of the call, so a process that does not know the
secret is refused before any of its content is read; the driver's challenge and the agent's proof follow, and then
sealed `channel.messages`. TLS is optional, and encrypts as well (MEGASCALE_TLS_*). `DriverServer` is the driver's end,
`AgentChannel` the agent's, which connects again with a growing pause whenever the connection is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from megascale.core.errors import Exit
from megascale.core.network import LOOPBACK, join_port
from megascale.operate.channel.gate import ADMISSION_S, MOST_STRANGERS, raise_descriptor_limit
from megascale.operate.channel.handshake import (
    HELLO_BYTES,
    PROOF_BYTES,
    ClientHandshake,
    NotAPeerError,
    Seal,
    ServerHandshake,
    Session,
)
from megascale.operate.channel.messages import AgentMessage, DriverMessage, Hello, Leave, Message, MessageError, to_json
from megascale.operate.channel.streams import (
    CLIENT_OPTIONS,
    SERVER_OPTIONS,
    Tls,
    client_credentials,
    first_end,
    open_sealed,
    read,
    server_credentials,
    write_all,
)
from megascale.operate.print_line import print_line

PURPOSE = "job's driver"
"""Purpose of the handshake."""

OUTBOX_MESSAGES = 256
"""Messages that wait to be sent to one peer; a peer that does not take them is disconnected."""

INBOX_MESSAGES = 8192
"""Messages of all agents that wait for the driver; then the agents wait."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0
"""Seconds between an agent's attempts to connect: doubled from the first to the longest, and varied by half."""

_LOST = (
    grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError, EOFError, MessageError, TimeoutError, OSError,
)  # fmt: skip
"""Errors of a connection that ends: gRPC raises InvalidStateError for a call that the other end has finished."""

_METHOD = "/megascale.Driver/Connect"
_HELLO_KEY = "megascale-hello-bin"


@dataclass(frozen=True)
class Disconnected:
    """The server's own notice that the connection of a node was lost, or replaced by a new one."""

    reason: str


@dataclass(eq=False)
class _Peer:
    """A connected agent: its start, messages to be sent, and the tasks of its connection."""

    started: float
    outbox: asyncio.Queue[DriverMessage] = field(default_factory=lambda: asyncio.Queue(OUTBOX_MESSAGES))
    tasks: list[asyncio.Task[str]] = field(default_factory=list)

    def disconnect(self) -> None:
        for task in self.tasks:
            task.cancel()


class DriverServer:
    """The driver's end. In `async with` it listens; iterating gives (node, message) of all agents in order of arrival,
    with Disconnected when a connection ends.

    `host`: address to listen at. `port`: 0 for any. `run`: the run whose observers may join, "" for any.
    Raises: OSError if it cannot listen there
    """

    def __init__(
        self, secret: bytes, host: str = LOOPBACK, port: int = 0, tls: Tls | None = None, run: str = ""
    ) -> None:
        self._secret = secret
        self._host = host
        self._tls = tls
        self._run = run
        self._peers: dict[str, _Peer] = {}
        self._unproved = 0
        self._inbox: asyncio.Queue[tuple[str, AgentMessage | Disconnected]] = asyncio.Queue(INBOX_MESSAGES)
        self.port = port
        self.refused = 0

    @property
    def agents(self) -> frozenset[str]:
        """The nodes whose agents are connected."""
        return frozenset(self._peers)

    @property
    def address(self) -> str:
        """Host and port of the listening socket."""
        return join_port(self._host, self.port)

    async def __aenter__(self) -> DriverServer:
        raise_descriptor_limit()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        service, method = _METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(self.address)
            else:
                port = self._server.add_secure_port(self.address, server_credentials(self._tls))
        except RuntimeError as error:
            raise OSError(f"cannot listen at {self.address}: {error}") from None
        if not port:
            raise OSError(f"cannot listen at {self.address}")
        self.port = port
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in list(self._peers.values()):
            peer.disconnect()
        await self._server.stop(grace=0.5)

    def __aiter__(self) -> AsyncIterator[tuple[str, AgentMessage | Disconnected]]:
        return self

    async def __anext__(self) -> tuple[str, AgentMessage | Disconnected]:
        return await self._inbox.get()

    def send(self, node: str, message: DriverMessage) -> bool:
        """Send a message to a node's agent, without waiting. Return False if it is not connected, or takes no messages:
        it is disconnected then.
        """
        peer = self._peers.get(node)
        if peer is None:
            return False
        try:
            peer.outbox.put_nowait(message)
        except asyncio.QueueFull:
            peer.disconnect()
            return False
        return True

    async def _serve(self, requests: object, context: Any) -> None:
        """Serve one call: admit, then read and write until either ends."""
        session = await self._admit(context)
        hello = await _read_hello(context, session.received)
        node, peer = hello.node, _Peer(hello.started)
        if (refusal := self._refusal(hello)) is not None:
            await context.write(session.sent.seal(to_json(refusal)))
            return
        if (earlier := self._peers.get(node)) is not None:
            earlier.disconnect()
        self._peers[node] = peer
        await self._inbox.put((node, hello))
        peer.tasks += [
            asyncio.ensure_future(self._receive(node, context, session.received)),
            asyncio.ensure_future(write_all(peer.outbox, context, session.sent)),
        ]
        reason = "the connection was lost"
        try:
            reason = await first_end(peer.tasks)
        finally:  # gRPC cancels this task when the agent's process ends
            if self._peers.get(node) is peer:
                del self._peers[node]
                await self._inbox.put((node, Disconnected(reason)))

    def _refusal(self, hello: Hello) -> Leave | None:
        """Return what an agent without a place here is told: it watches another run, or a later one has joined."""
        if hello.run and self._run not in ("", hello.run):
            print_line(f"node {hello.node} was turned away: it watches run {hello.run}, this driver run {self._run}")
            hint = "give each run a port of its own, --driver HOST:PORT"
            return Leave(f"this driver watches run {self._run}, not {hello.run}  -> {hint}", Exit.CONFIG)
        earlier = self._peers.get(hello.node)
        if earlier is not None and earlier.started > hello.started:
            return Leave(f"a later agent of node {hello.node} has joined")
        return None

    async def _admit(self, context: Any) -> Session:
        """Return the session of a peer that proves to know the secret; abort the call of any other."""
        hello = dict(context.invocation_metadata() or ()).get(_HELLO_KEY, b"")
        handshake = ServerHandshake(self._secret, PURPOSE)
        challenge = handshake.challenge(hello) if len(hello) == HELLO_BYTES else None
        if challenge is None:
            await self._refuse(context)
        if self._unproved >= MOST_STRANGERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        self._unproved += 1
        proof: object = b""
        try:
            with contextlib.suppress(TimeoutError, EOFError):
                async with asyncio.timeout(ADMISSION_S):
                    await context.write(challenge)
                    proof = await read(context)
        finally:
            self._unproved -= 1
        session = handshake.admit(proof) if isinstance(proof, bytes) and len(proof) == PROOF_BYTES else None
        if session is None:
            await self._refuse(context)
        assert session is not None  # `_refuse` raises
        return session

    async def _refuse(self, context: Any) -> None:
        """Abort a stranger's call. Name the first stranger, and then ever fewer."""
        self.refused += 1
        if self.refused in (1, 10, 100) or self.refused % 1000 == 0:
            count = f" ({self.refused} so far)" if self.refused > 1 else ""
            text = f"a process at {context.peer()} without the job's secret was refused at the {PURPOSE}"
            with contextlib.suppress(OSError):
                print(f"megascale: {text}{count}", file=sys.stderr, flush=True)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "")

    async def _receive(self, node: str, context: Any, seal: Seal) -> str:
        try:
            while True:
                await self._inbox.put((node, _from_agent(open_sealed(seal, await read(context)))))
        except EOFError:
            return "the agent ended the connection"
        except (NotAPeerError, MessageError) as error:
            return str(error)


class AgentChannel:
    """The agent's end. In `async with` it connects, and connects again; iterating gives the driver's messages.

    `greeting`: returns what each new connection sends first, a Hello and what the driver may have missed. Iterating
    raises NotAPeerError if the driver refuses this process, or does not know the secret, at the first connection.
    """

    def __init__(
        self, address: str, secret: bytes, greeting: Callable[[], Sequence[AgentMessage]], tls: Tls | None = None
    ) -> None:
        self._address = address
        self._secret = secret
        self._greeting = greeting
        self._tls = tls
        self._outbox: asyncio.Queue[AgentMessage] | None = None
        self._inbox: asyncio.Queue[DriverMessage | Exception] = asyncio.Queue(OUTBOX_MESSAGES)
        self._lost_at = time.monotonic()
        self.connections = 0

    @property
    def lost_s(self) -> float:
        """Seconds since the connection was lost; 0 while it stands."""
        return 0.0 if self._outbox is not None else time.monotonic() - self._lost_at

    async def __aenter__(self) -> AgentChannel:
        self._task = asyncio.ensure_future(self._keep_connected())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._flushed(), 1.0)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def __aiter__(self) -> AsyncIterator[DriverMessage]:
        return self

    async def __anext__(self) -> DriverMessage:
        message = await self._inbox.get()
        if isinstance(message, Exception):
            raise message
        return message

    def send(self, message: AgentMessage) -> bool:
        """Send a message, without waiting. Return False while the driver is lost: the message is dropped."""
        if self._outbox is None:
            return False
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:  # a driver that is stopped: the probes of the connection will end it
            return False
        return True

    async def _flushed(self) -> None:
        if self._outbox is not None:
            await self._outbox.join()

    async def _keep_connected(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            before = self.connections
            try:
                await self._connect()
            except NotAPeerError as error:
                if not self.connections:
                    await self._inbox.put(error)
                    return
            except _LOST:
                pass  # `lost_s` says since when
            except Exception as error:  # a bug: whoever iterates gets it
                await self._inbox.put(error)
                return
            pause = FIRST_PAUSE_S if self.connections > before else min(2 * pause, LONGEST_PAUSE_S)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    async def _connect(self) -> None:
        """Serve one connection until it ends. Raises: NotAPeerError, EOFError, TimeoutError, grpc.aio.AioRpcError"""
        if self._tls is None:
            channel = grpc.aio.insecure_channel(self._address, options=CLIENT_OPTIONS)
        else:
            channel = grpc.aio.secure_channel(self._address, client_credentials(self._tls), options=CLIENT_OPTIONS)
        async with channel:
            handshake = ClientHandshake(self._secret, PURPOSE)
            call = channel.stream_stream(_METHOD)(metadata=((_HELLO_KEY, handshake.hello),))
            async with asyncio.timeout(2 * ADMISSION_S):
                session = await _prove(call, handshake)
            outbox: asyncio.Queue[AgentMessage] = asyncio.Queue(OUTBOX_MESSAGES)
            for message in self._greeting():
                outbox.put_nowait(message)
            self._outbox = outbox
            self.connections += 1
            try:
                await first_end(
                    [
                        asyncio.ensure_future(self._receive(call, session.received)),
                        asyncio.ensure_future(write_all(outbox, call, session.sent)),
                    ]
                )
            finally:
                self._outbox, self._lost_at = None, time.monotonic()
                call.cancel()

    async def _receive(self, call: Any, seal: Seal) -> str:
        while True:
            await self._inbox.put(_from_driver(open_sealed(seal, await read(call))))


async def _prove(call: Any, handshake: ClientHandshake) -> Session:
    """Answer the driver's challenge. Raises: NotAPeerError if either end does not know the other's secret"""
    try:
        challenge = await read(call)
    except (EOFError, grpc.aio.AioRpcError):
        if await call.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise NotAPeerError("the driver refused this agent: it has another secret than this process") from None
        raise
    proof, session = handshake.answer(challenge)
    await call.write(proof)
    return session


async def _read_hello(context: Any, seal: Seal) -> Hello:
    """Return an admitted agent's first message; abort the call if it is anything else."""
    try:
        message = open_sealed(seal, await asyncio.wait_for(read(context), ADMISSION_S))
        if not isinstance(message, Hello):
            raise MessageError(f"the first message is a {type(message).__name__}, not a Hello")
        return message
    except (NotAPeerError, MessageError, EOFError, TimeoutError) as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise


def _from_agent(message: Message) -> AgentMessage:
    if not isinstance(message, AgentMessage):
        raise MessageError(f"an agent sent a {type(message).__name__}")
    return message


def _from_driver(message: Message) -> DriverMessage:
    if not isinstance(message, DriverMessage):
        raise MessageError(f"the driver sent a {type(message).__name__}")
    return message
