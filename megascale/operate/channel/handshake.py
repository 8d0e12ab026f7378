"""Proof that both ends of a connection know the job's secret, and seals of the messages that follow.

    client      HELLO: 32 random bytes, and their MAC: whoever cannot make it gets no answer at all
    server      CHALLENGE: 32 random bytes, and a MAC over both ends' bytes
    client      PROOF: another MAC over both ends' bytes

A MAC is HMAC-SHA256 with the secret as key, over the step's name, the `purpose` of the connection and the bytes. No
message can be replayed, because both ends draw new bytes. Each direction then has its own key (`Seal`), and a seal is
keyed BLAKE2b (RFC 7693): a server of a thousand ranks seals each answer, and HMAC takes three times as long on a short
one. Contents are not encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass

NONCE_BYTES = MAC_BYTES = 32
HELLO_BYTES = CHALLENGE_BYTES = NONCE_BYTES + MAC_BYTES
PROOF_BYTES = MAC_BYTES

TAG_BYTES = 16  # bytes of a message's seal: a keyed BLAKE2b of that length
HEAD = struct.Struct(f"<I{TAG_BYTES}s")  # head of a message: bytes of the content, and its seal
_NUMBER = struct.Struct("<Q")  # number of a message in its direction, before its content in the seal
RETRY_S = 0.1  # seconds between attempts to reach a server that does not listen yet

_FOR_A_MOMENT = (
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT,
)  # fmt: skip

ATTEMPTS = 3  # handshakes until a server that hangs up is given up: strangers may have crowded out the first ones


class NotAPeerError(ConnectionError):
    """The other end does not know the job's secret, or a message has a wrong seal."""


class HungUpError(NotAPeerError):
    """The server closed the connection without an answer."""


class Seal:
    """The seals of one direction of a connection. A message out of order, or of another connection, is refused."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=TAG_BYTES)
        self._messages = 0

    def seal(self, content: bytes) -> bytes:
        """Return the message: head and content."""
        return HEAD.pack(len(content), self._next_tag(content)) + content

    def check(self, tag: bytes, content: bytes) -> None:
        """Raises: NotAPeerError if `content` is not the next message of the direction."""
        if not hmac.compare_digest(tag, self._next_tag(content)):
            raise NotAPeerError("a message has a wrong seal: it was changed on its way, or came from another process")

    def _next_tag(self, content: bytes) -> bytes:
        self._messages += 1
        mac = self._keyed.copy()
        mac.update(_NUMBER.pack(self._messages))
        mac.update(content)
        return mac.digest()


@dataclass(frozen=True)
class Session:
    """The seals of a connection on one of its ends."""

    sent: Seal
    received: Seal


class _Handshake:
    """The part of both ends: a MAC over a step's name, the purpose and the random bytes so far."""

    def __init__(self, secret: bytes, purpose: str) -> None:
        self._secret, self._purpose = secret, purpose.encode()
        self._nonces = b""

    def _mac(self, step: bytes) -> bytes:
        """HMAC-SHA256 over parts, each with its length before it."""
        parts = (step, self._purpose, self._nonces)
        text = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
        return hmac.digest(self._secret, text, "sha256")


class ClientHandshake(_Handshake):
    """A handshake on the client's end. `hello`: the first message, HELLO_BYTES long."""

    def __init__(self, secret: bytes, purpose: str) -> None:
        super().__init__(secret, purpose)
        self._nonces = secrets.token_bytes(NONCE_BYTES)
        self.hello = self._nonces + self._mac(b"hello")

    def answer(self, challenge: bytes) -> tuple[bytes, Session]:
        """Return the proof that answers the server's challenge, and the client's seals.

        Raises: NotAPeerError if the server does not know the secret
        """
        self._nonces = self.hello[:NONCE_BYTES] + challenge[:NONCE_BYTES]
        if not hmac.compare_digest(challenge[NONCE_BYTES:], self._mac(b"server")):
            raise NotAPeerError("it does not know the job's secret")
        return self._mac(b"client"), Session(Seal(self._mac(b"to server")), Seal(self._mac(b"to client")))


class ServerHandshake(_Handshake):
    """A handshake on the server's end."""

    def challenge(self, hello: bytes) -> bytes | None:
        """Return the challenge that answers a client's hello; None for a stranger's."""
        self._nonces = hello[:NONCE_BYTES]
        if not hmac.compare_digest(hello[NONCE_BYTES:], self._mac(b"hello")):
            return None
        own = secrets.token_bytes(NONCE_BYTES)
        self._nonces += own
        return own + self._mac(b"server")

    def admit(self, proof: bytes) -> Session | None:
        """Return the server's seals if a client's proof is right; None for a stranger's."""
        if not hmac.compare_digest(proof, self._mac(b"client")):
            return None
        return Session(Seal(self._mac(b"to client")), Seal(self._mac(b"to server")))


def connect(address: tuple[str, int], secret: bytes, purpose: str, timeout: float) -> tuple[socket.socket, Session]:
    """Connect to a server within `timeout` seconds, also to one that does not listen yet.

    Raises: NotAPeerError if the two ends do not know the same secret; OSError if the server cannot be reached
    """
    deadline = time.monotonic() + timeout
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(HungUpError):
            return _shake_hands(_connect(address, deadline), secret, purpose, deadline)
        time.sleep(RETRY_S)
    return _shake_hands(_connect(address, deadline), secret, purpose, deadline)


def _shake_hands(
    connection: socket.socket, secret: bytes, purpose: str, deadline: float
) -> tuple[socket.socket, Session]:
    try:
        handshake = ClientHandshake(secret, purpose)
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        connection.sendall(handshake.hello)
        try:
            challenge = receive_exactly(connection, CHALLENGE_BYTES)
        except (EOFError, ConnectionResetError):
            raise HungUpError("it hung up: it has another secret than this process") from None
        proof, session = handshake.answer(challenge)
        connection.sendall(proof)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection, session


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, max(0.01, deadline - time.monotonic()))
        except OSError as error:
            if error.errno not in _FOR_A_MOMENT or time.monotonic() + RETRY_S > deadline:
                raise
            time.sleep(RETRY_S)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive `size` bytes. Raises: EOFError if the connection ends before"""
    data = bytearray(size)
    with memoryview(data) as view:
        done = 0
        while done < size:
            count = connection.recv_into(view[done:])
            if not count:
                raise EOFError(f"{size - done} of {size} bytes are missing")
            done += count
    return bytes(data)


def receive_message(connection: socket.socket, session: Session, max_bytes: int) -> bytes:
    """Receive the content of a sealed message.

    Raises: EOFError if the connection ends before, NotAPeerError for a message that is too long or has a wrong seal
    """
    size, tag = HEAD.unpack(receive_exactly(connection, HEAD.size))
    if size > max_bytes:
        raise NotAPeerError(f"a message of {size} bytes is too long")
    content = receive_exactly(connection, size)
    session.received.check(tag, content)
    return content
