"""The driver's end of its connection to the agents: one stream of gRPC for each agent, proved and sealed by the job's
secret.

The agent sends the first message of `channel.handshake` as metadata of the call, so a process that does not know the
secret is refused before any of its content is read; the driver's challenge and the agent's proof follow, and then
sealed `channel.messages`. TLS is optional, and encrypts as well (MEGASCALE_TLS_*). The agent's end is
`channel.agent_channel`.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any, Never, Self

import grpc
import grpc.aio

from megascale.core.errors import Exit
from megascale.core.limits import raise_soft_limits
from megascale.core.network import LOOPBACK, join_port
from megascale.operate.channel.ends import Disconnected, DriverEnd
from megascale.operate.channel.gate import ADMISSION_S, MOST_STRANGERS, print_refusal
from megascale.operate.channel.handshake import HELLO_BYTES, PROOF_BYTES, NotAPeerError, Seal, ServerHandshake, Session
from megascale.operate.channel.messages import AgentMessage, DriverMessage, Hello, Leave, MessageError, to_json
from megascale.operate.channel.streams import (
    HELLO_KEY,
    METHOD,
    OUTBOX_MESSAGES,
    PURPOSE,
    SERVER_OPTIONS,
    Tls,
    first_end,
    open_sealed,
    read,
    write_all,
)
from megascale.operate.print_line import print_line

INBOX_MESSAGES = 8192  # messages of all agents that wait for the driver; then the agents wait


@dataclass(eq=False)
class _Peer:
    """A connected agent: its start, and the tasks of its connection."""

    started: float
    tasks: list[asyncio.Task[str]] = field(default_factory=list)

    def disconnect(self) -> None:
        for task in self.tasks:
            task.cancel()


class DriverServer(DriverEnd):
    """The driver's end. In `async with` it listens.

    `host`: address to listen at. `port`: 0 for any. `run`: the run whose observers may join, "" for any.
    Raises: OSError if it cannot listen there
    """

    def __init__(
        self, secret: bytes, host: str = LOOPBACK, port: int = 0, tls: Tls | None = None, run: str = ""
    ) -> None:
        super().__init__(INBOX_MESSAGES)
        self._secret = secret
        self._host = host
        self._tls = tls
        self._run = run
        self._peers: dict[str, _Peer] = {}
        self._unproved = 0
        self.port = port
        self.refused = 0

    @property
    def address(self) -> str:
        """Host and port of the listening socket."""
        return join_port(self._host, self.port)

    async def __aenter__(self) -> Self:
        raise_soft_limits()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        service, method = METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(self.address)
            else:
                pair = self._tls.key, self._tls.certificate
                proved = grpc.ssl_server_credentials([pair], self._tls.authority, require_client_auth=True)
                port = self._server.add_secure_port(self.address, proved)
        except RuntimeError as error:
            raise OSError(f"cannot listen at {self.address}: {error}") from None
        if not port:
            raise OSError(f"cannot listen at {self.address}")
        self.port = port
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        for peer in list(self._peers.values()):
            peer.disconnect()
        await self._server.stop(grace=0.5)

    def send(self, node: str, message: DriverMessage) -> bool:
        """Send a message to a node's agent, without waiting. Return False if it is not connected, or takes no messages:
        it is disconnected then.
        """
        try:
            return super().send(node, message)
        except asyncio.QueueFull:
            self._peers[node].disconnect()
            return False

    async def _serve(self, requests: object, context: Any) -> None:
        """Serve one call: admit, then read and write until either ends."""
        session = await self._admit(context)
        try:
            hello = open_sealed(session.received, await asyncio.wait_for(read(context), ADMISSION_S))
            if not isinstance(hello, Hello):
                raise MessageError(f"the first message is a {type(hello).__name__}, not a Hello")
        except (NotAPeerError, MessageError, EOFError, TimeoutError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        node, peer = hello.node, _Peer(hello.started)
        if (refusal := self._refusal(hello)) is not None:
            await context.write(session.sent.seal(to_json(refusal)))
            return
        if (earlier := self._peers.get(node)) is not None:
            earlier.disconnect()
        self._peers[node] = peer
        outbox: asyncio.Queue[DriverMessage] = asyncio.Queue(OUTBOX_MESSAGES)
        self.outboxes[node] = outbox
        await self.inbox.put((node, hello))
        peer.tasks += [
            asyncio.ensure_future(self._receive(node, context, session.received)),
            asyncio.ensure_future(write_all(outbox, context, session.sent)),
        ]
        reason = "the connection was lost"
        try:
            reason = await first_end(peer.tasks)
        finally:  # gRPC cancels this task when the agent's process ends
            if self._peers.get(node) is peer:
                del self._peers[node], self.outboxes[node]
                await self.inbox.put((node, Disconnected(reason)))

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
        hello = dict(context.invocation_metadata() or ()).get(HELLO_KEY, b"")
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
        return session

    async def _refuse(self, context: Any) -> Never:
        """Abort a stranger's call."""
        self.refused += 1
        print_refusal(self.refused, context.peer(), PURPOSE)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "")
        raise AssertionError("abort raises")

    async def _receive(self, node: str, context: Any, seal: Seal) -> str:
        try:
            while True:
                message = open_sealed(seal, await read(context))
                if not isinstance(message, AgentMessage):
                    raise MessageError(f"an agent sent a {type(message).__name__}")
                await self.inbox.put((node, message))
        except EOFError:
            return "the agent ended the connection"
        except (NotAPeerError, MessageError) as error:
            return str(error)
