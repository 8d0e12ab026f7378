"""Handshake and gate: who is admitted, and what a stranger gets and costs."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from megascale.core.network import LOOPBACK, listen
from megascale.operate.channel import gate as gate_module
from megascale.operate.channel.gate import Gate
from megascale.operate.channel.handshake import (
    CHALLENGE_BYTES,
    HEAD,
    HELLO_BYTES,
    ClientHandshake,
    NotAPeerError,
    ServerHandshake,
    Session,
    connect,
    receive_exactly,
)

SECRET = secrets.token_bytes(32)


class Server:
    """A gate in a thread; `admitted` are its peers."""

    def __init__(self) -> None:
        self.listener = listen(LOOPBACK)
        self.address: tuple[str, int] = self.listener.getsockname()
        self.admitted: list[tuple[socket.socket, Session]] = []
        self._selector = selectors.DefaultSelector()
        self.gate = Gate(self.listener, self._selector, SECRET, "test", lambda *peer: self.admitted.append(peer))
        self._stops = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stops:
            for key, _ in self._selector.select(0.02):
                key.data()
            self.gate.expire()

    def stop(self) -> None:
        self._stops = True
        self._thread.join()
        self.listener.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def stranger(server: Server, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(server.address)
    connection.settimeout(10)
    connection.sendall(data)
    return connection


def answer_to(server: Server, data: bytes) -> bytes:
    """All that a stranger who sends `data` gets until the server hangs up."""
    with stranger(server, data) as connection:
        received = b""
        try:
            while part := connection.recv(1 << 16):
                received += part
        except ConnectionResetError:  # the server has left some of the data unread
            return received
        return received


def test_a_peer_is_admitted_and_messages_are_sealed(server: Server) -> None:
    connection, session = connect(server.address, SECRET, "test", 10)
    connection.sendall(session.sent.seal(b"first") + session.sent.seal(b"second"))
    deadline = time.monotonic() + 10
    while not server.admitted and time.monotonic() < deadline:
        time.sleep(0.01)
    peer, seals = server.admitted[0]
    peer.settimeout(10)
    for expected in (b"first", b"second"):
        size, tag = HEAD.unpack(receive_exactly(peer, HEAD.size))
        content = receive_exactly(peer, size)
        seals.received.check(tag, content)
        assert content == expected
    connection.close()
    peer.close()


def sessions() -> tuple[Session, Session]:
    client, server = ClientHandshake(SECRET, "test"), ServerHandshake(SECRET, "test")
    challenge = server.challenge(client.hello)
    assert challenge is not None
    proof, ours = client.answer(challenge)
    theirs = server.admit(proof)
    assert theirs is not None
    return ours, theirs


@pytest.mark.parametrize("attack", ["changed", "replayed", "out of order", "reflected", "another connection's"])
def test_a_message_with_a_wrong_seal_is_refused(attack: str) -> None:
    client, server = sessions()
    message = client.sent.seal(b"a value")
    tag, content = message[4 : HEAD.size], message[HEAD.size :]
    if attack == "changed":
        content = b"a Value"
    elif attack == "replayed":
        server.received.check(tag, content)
    elif attack == "out of order":
        tag = client.sent.seal(b"a value")[4 : HEAD.size]
    elif attack == "reflected":
        server = client
    else:
        _, server = sessions()
    with pytest.raises(NotAPeerError, match="wrong seal"):
        server.received.check(tag, content)


def test_a_wrong_secret_or_purpose_is_refused_by_both_ends(server: Server) -> None:
    for secret, purpose in ((secrets.token_bytes(32), "test"), (SECRET, "another")):
        with pytest.raises(NotAPeerError, match="another secret"):
            connect(server.address, secret, purpose, 10)
    assert not server.admitted
    impostor = ServerHandshake(secrets.token_bytes(32), "test")
    assert impostor.challenge(ClientHandshake(SECRET, "test").hello) is None
    with pytest.raises(NotAPeerError, match="does not know the job's secret"):
        ClientHandshake(SECRET, "test").answer(secrets.token_bytes(CHALLENGE_BYTES))


def test_a_stranger_gets_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "ADMISSION_S", 0.2)
    hello = ClientHandshake(SECRET, "test").hello
    for data in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * (1 << 20), hello[: HELLO_BYTES // 2], hello[::-1]):
        assert answer_to(server, data) == b""
    replayed = answer_to(server, hello + hello)  # an overheard hello gets a challenge, and no further
    assert len(replayed) in (0, CHALLENGE_BYTES)
    assert not server.admitted


def test_a_crowd_of_silent_strangers_keeps_no_peer_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "MOST_STRANGERS", 10)
    crowd = [stranger(server, b"x") for _ in range(100)]
    connection, _ = connect(server.address, SECRET, "test", 10)
    deadline = time.monotonic() + 10
    while not server.admitted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(server.admitted) == 1
    assert len(server.gate._strangers) <= 10
    for each in (*crowd, connection):
        each.close()


def test_a_stranger_is_named_and_a_scan_of_ports_is_not(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    stranger(server).close()
    with stranger(server, b"\0" * HELLO_BYTES) as connection:
        name = "{}:{}".format(*connection.getsockname())
        assert connection.recv(1) == b""
    expected = f"megascale: a process at {name} without the job's secret was refused at the test\n"
    assert capfd.readouterr().err == expected
