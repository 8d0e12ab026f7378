"""Streams of gRPC between driver and agents: limits and options, TLS, and reading and writing sealed messages."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from megascale.core.errors import ConfigError, Problem
from megascale.operate.channel.gate import ADMISSION_S
from megascale.operate.channel.handshake import HEAD, NotAPeerError, Seal
from megascale.operate.channel.messages import Message, from_json, to_json

PURPOSE = "job's driver"  # purpose of the handshake

METHOD = "/megascale.Driver/Connect"

HELLO_KEY = "megascale-hello-bin"  # key of a call's metadata: the first message of the handshake
OUTBOX_MESSAGES = 256  # messages that wait to be sent to one peer; an agent that does not take them is disconnected
MAX_MESSAGE_BYTES = 16 << 20  # most bytes of a message: the flight records of a node's ranks
KEEPALIVE_S = 5.0  # seconds between probes of an idle connection, and seconds in which the other end must answer one

TLS_VARIABLES = ("MEGASCALE_TLS_CERTIFICATE", "MEGASCALE_TLS_KEY", "MEGASCALE_TLS_CA")
"""Environment variables: PEM files of this process's certificate and key, and of the authority of both ends."""

_LIMITS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + HEAD.size),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + HEAD.size),
    ("grpc.max_metadata_size", 4096),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.server_handshake_timeout_ms", int(ADMISSION_S * 1000)),
    ("grpc.max_connection_idle_ms", int(ADMISSION_S * 1000)),  # a connection without a call
    ("grpc.max_concurrent_streams", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
    ("grpc.so_reuseport", 1),  # the supervisor keeps the port for the next driver: `core.network.reserve_port`
]
CLIENT_OPTIONS = [
    *_LIMITS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True)
class Tls:
    """PEM texts of a process: its certificate and key, and the authority's certificate."""

    certificate: bytes
    key: bytes
    authority: bytes


def tls_from_environment(env: Mapping[str, str] = os.environ) -> Tls | None:
    """Read the files that TLS_VARIABLES name; None if no variable is set.

    Raises: ConfigError if only some variables are set, or a file cannot be read.
    """
    if not any(env.get(name) for name in TLS_VARIABLES):
        return None
    texts = []
    for name in TLS_VARIABLES:
        try:
            texts.append(Path(env[name]).read_bytes())
        except KeyError:
            hint = f"set {', '.join(TLS_VARIABLES)}, or none of them"
            raise ConfigError([Problem("environment", name, "not set, but another variable of TLS is", hint)]) from None
        except OSError as error:
            hint = "a PEM file that this user can read"
            raise ConfigError([Problem("environment", name, f"{env[name]}: {error.strerror}", hint)]) from None
    return Tls(*texts)


def open_sealed(seal: Seal, data: bytes) -> Message:
    """Return the message in sealed bytes. Raises: NotAPeerError, MessageError"""
    if len(data) < HEAD.size:
        raise NotAPeerError(f"a message of {len(data)} bytes has no seal")
    size, tag = HEAD.unpack_from(data)
    content = data[HEAD.size :]
    if size != len(content):
        raise NotAPeerError("a message has a wrong length")
    seal.check(tag, content)
    return from_json(content)


async def read(stream: Any) -> bytes:
    """Read one message of gRPC. Raises: EOFError, grpc.aio.AioRpcError"""
    data = await stream.read()
    if data is grpc.aio.EOF:
        raise EOFError("the other end has left")
    return bytes(data)


async def write_all(outbox: asyncio.Queue, stream: Any, seal: Seal) -> str:
    """Write the messages of `outbox` until the stream or the task ends."""
    while True:
        message = await outbox.get()
        await stream.write(seal.seal(to_json(message)))
        outbox.task_done()


async def first_end(tasks: Sequence[asyncio.Task[str]]) -> str:
    """Wait for the first task to end, end the others, and say why it ended."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    first = done.pop()
    if first.cancelled():
        return "disconnected"
    error = first.exception()
    return first.result() if error is None else (str(error) or type(error).__name__)
