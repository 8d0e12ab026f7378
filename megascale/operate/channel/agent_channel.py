"""The agent's end of its connection to the driver (`channel.driver_server`), which it makes again with a growing pause
whenever it is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any, Self

import grpc
import grpc.aio

from megascale.operate.channel.ends import AgentEnd, Greeting
from megascale.operate.channel.gate import ADMISSION_S
from megascale.operate.channel.handshake import ClientHandshake, NotAPeerError, Seal
from megascale.operate.channel.messages import AgentMessage, DriverMessage, MessageError
from megascale.operate.channel.streams import (
    CLIENT_OPTIONS,
    HELLO_KEY,
    METHOD,
    OUTBOX_MESSAGES,
    PURPOSE,
    Tls,
    first_end,
    open_sealed,
    read,
    write_all,
)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0
"""Seconds between an agent's attempts to connect: doubled from the first to the longest, and varied by half."""

_LOST = (
    grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError, EOFError, MessageError, TimeoutError, OSError,
)  # fmt: skip
"""Errors of a connection that ends: gRPC raises InvalidStateError for a call that the other end has finished."""


class AgentChannel(AgentEnd):
    """The agent's end. In `async with` it connects, and connects again.

    `greeting`: returns what each new connection sends first, a Hello and what the driver may have missed. Iterating
    raises NotAPeerError if the driver refuses this process, or does not know the secret, at the first connection.
    """

    def __init__(self, address: str, secret: bytes, greeting: Greeting, tls: Tls | None = None) -> None:
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
        return 0.0 if self._outbox is not None else time.monotonic() - self._lost_at

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._keep_connected())
        return self

    async def __aexit__(self, *error: object) -> None:
        with contextlib.suppress(TimeoutError):
            if self._outbox is not None:
                await asyncio.wait_for(self._outbox.join(), 1.0)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def __anext__(self) -> DriverMessage:
        message = await self._inbox.get()
        if isinstance(message, Exception):
            raise message
        return message

    def send(self, message: AgentMessage) -> bool:
        if self._outbox is None:
            return False
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:  # a driver that is stopped: the probes of the connection will end it
            return False
        return True

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
            own = grpc.ssl_channel_credentials(self._tls.authority, self._tls.key, self._tls.certificate)
            channel = grpc.aio.secure_channel(self._address, own, options=CLIENT_OPTIONS)
        async with channel:
            handshake = ClientHandshake(self._secret, PURPOSE)
            call = channel.stream_stream(METHOD)(metadata=((HELLO_KEY, handshake.hello),))
            async with asyncio.timeout(2 * ADMISSION_S):
                try:
                    challenge = await read(call)
                except (EOFError, grpc.aio.AioRpcError):
                    if await call.code() == grpc.StatusCode.UNAUTHENTICATED:
                        what = "the driver refused this agent: it has another secret than this process"
                        raise NotAPeerError(what) from None
                    raise
                proof, session = handshake.answer(challenge)
                await call.write(proof)
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
            message = open_sealed(seal, await read(call))
            if not isinstance(message, DriverMessage):
                raise MessageError(f"the driver sent a {type(message).__name__}")
            await self._inbox.put(message)
