"""The job's store: the semantics of torch's own, waits, and processes without the job's secret."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from megascale.comm import rendezvous
from megascale.comm.rendezvous import start_server
from megascale.comm.store import JobStore
from megascale.core.errors import ConfigError
from megascale.core.network import LOOPBACK, listen
from megascale.core.rank import Rank
from megascale.operate.channel.handshake import NotAPeerError
from megascale.operate.node.failure import is_peer_lost

SECRET = secrets.token_bytes(32)
TEN = datetime.timedelta(seconds=10)
SOON = datetime.timedelta(milliseconds=50)


class Server:
    """A running store, and connections to it."""

    def __init__(self) -> None:
        listener = listen(LOOPBACK)
        self.address: tuple[str, int] = listener.getsockname()
        self.process = start_server(listener, SECRET)
        listener.close()

    def client(self) -> JobStore:
        return JobStore(self.address, SECRET, TEN)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.process.kill()
    server.process.wait()


def everything(store: Any) -> list[Any]:
    """The results of all requests, and the text of the error of a wait in vain."""
    results = [store.set("text", "ä"), store.set("bytes", b"\0\xff"), store.get("text"), store.get("bytes")]
    results += [store.add("n", 5), store.add("n", -7), store.get("n"), store.append("a", b"x"), store.append("a", "y")]
    results += [store.get("a"), store.check(["n", "a"]), store.check(["n", "none"]), store.check([])]
    results += [store.compare_set("c", "", "new"), store.compare_set("c", "old", "newer")]
    results += [
        store.compare_set("c", "new", "newer"),
        store.compare_set("none", "some", "value"),
        store.check(["none"]),
    ]
    results += [store.multi_set(["p", "q"], ["1", "2"]), store.multi_get(["q", "p"]), store.wait(["p", "q"], TEN)]
    results += [store.delete_key("p"), store.delete_key("p"), store.check(["p"])]
    with pytest.raises(dist.DistStoreError) as raised:
        store.wait(["q", "missing"], SOON)
    return [*results, store.get("q"), str(raised.value).split(",")[0], is_peer_lost(raised.value)]


def test_the_same_answers_as_torchs_own_store() -> None:
    server, torchs = Server(), dist.TCPStore(LOOPBACK, 0, is_master=True, timeout=TEN)
    expected = everything(torchs)
    ours = server.client()
    assert everything(ours) == expected
    assert ours.num_keys() == torchs.num_keys()
    assert everything(dist.PrefixStore("prefix", ours))[:-3] == expected[:-3]
    server.process.kill()


def test_a_wait_ends_with_the_last_of_its_keys(server: Server) -> None:
    waiting, writing = server.client(), server.client()
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.extend(waiting.multi_get(["last", "first"])))
    thread.start()
    writing.set("first", "1")
    time.sleep(0.05)
    assert not got
    writing.append("last", "2")
    thread.join(10)
    assert got == [b"2", b"1"]


def test_large_values_arrive_whole(server: Server) -> None:
    value = secrets.token_bytes(20 << 20)
    server.client().set("large", value)
    assert server.client().get("large") == value


def test_a_store_that_has_gone_is_a_lost_peer() -> None:
    server = Server()
    store = server.client()
    server.process.kill()
    what = "connection closed by peer: the process of the job's store, which rank 0 started, has ended"
    with pytest.raises(dist.DistNetworkError, match=what) as raised:
        store.get("key")
    assert is_peer_lost(raised.value)


def test_the_server_ends_with_its_standard_input() -> None:
    server = Server()
    assert server.process.stdin is not None
    server.process.stdin.close()
    assert server.process.wait(10) == 0


def test_a_client_of_torchs_own_store_gets_nothing(server: Server) -> None:
    with socket.create_connection(server.address) as connection:
        connection.settimeout(10)
        connection.sendall(b"\x00\x3c\x85\xf7\xce" * 100)
        with contextlib.suppress(ConnectionResetError):  # the rest of what was sent is left unread
            assert connection.recv(1) == b""


@pytest.mark.parametrize("bad", [b"", b"\x01", b"\xff" * 40, b"\x03\x00\x00\x00add\x01\x00\x00\x00n\x01\x00\x00\x00x"])
def test_a_malformed_request_of_a_rank_ends_its_connection_alone(bad: bytes, server: Server) -> None:
    broken, sound = server.client(), server.client()
    broken._connection.sendall(broken._session.sent.seal(bad))
    assert broken._connection.recv(1) == b""
    assert sound.add("still there", 1) >= 1


def test_a_rank_with_another_secret_is_refused_with_one_line(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotAPeerError, match="another secret"):
        JobStore(server.address, secrets.token_bytes(32), TEN)
    monkeypatch.setenv("MEGASCALE_STORE", "{}:{}".format(*server.address))
    with pytest.raises(ConfigError) as raised:
        rendezvous.open_store(Rank(1, 2, 1, "host"), secrets.token_bytes(32), TEN)
    line, _ = str(raised.value).splitlines()
    assert line.startswith(f"the job's store at 127.0.0.1:{server.address[1]}") and "MEGASCALE_JOB_SECRET" in line


def test_a_store_that_does_not_know_the_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has taken the port before rank 0 did, and answers."""
    with listen(LOOPBACK) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.sendall(secrets.token_bytes(64))

        threading.Thread(target=answer, daemon=True).start()
        monkeypatch.setenv("MEGASCALE_STORE", "{}:{}".format(*listener.getsockname()))
        with pytest.raises(ConfigError, match="does not know the job's secret"):
            rendezvous.open_store(Rank(1, 2, 1, "host"), SECRET, TEN)


@pytest.mark.parametrize("written", ["stranger 29500", "127.0.0.1 99999", "garbage", "\0" * 1000])
def test_an_address_that_a_stranger_wrote_into_torchruns_store_is_refused(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    impostor = listen(LOOPBACK)
    threading.Thread(target=lambda: [impostor.accept()[0].close() for _ in range(3)], daemon=True).start()
    agent = dist.TCPStore(LOOPBACK, 0, is_master=True, timeout=TEN)
    text = f"127.0.0.1 {impostor.getsockname()[1]}" if written.startswith("stranger") else written
    agent.set("megascale/store/0", text)
    environment = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        rendezvous.open_store(Rank(1, 2, 1, "host"), SECRET, TEN)
    assert "the job's store" in str(raised.value)


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RETRY_S", 1.0)
    with listen(LOOPBACK) as taken:
        monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"MASTER_PORT: rank 0 cannot listen at 127.0.0.1:.*in use"):
            rendezvous.open_store(Rank(0, 2, 0, "host"), SECRET, TEN)


def test_the_secret_is_not_on_a_command_line(server: Server) -> None:
    seen = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert "megascale.operate.channel.store_server" in seen and SECRET.hex() not in seen
