"""The server of metrics: what it answers, and what strangers cannot do."""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from megascale.core.network import listen
from megascale.operate.store import metrics_server
from megascale.operate.store.metrics_server import CONNECTIONS, MetricsServer


def free_port() -> int:
    with listen("127.0.0.1") as one:
        return int(one.getsockname()[1])


@contextmanager
def server(render: Callable[[], bytes], said: list[str] | None = None) -> Iterator[MetricsServer]:
    said = [] if said is None else said
    one = MetricsServer(render, "127.0.0.1", free_port(), said.append)
    thread = threading.Thread(target=one.run)
    thread.start()
    try:
        yield one
    finally:
        one.close()
        thread.join(10)
        assert not thread.is_alive()


def get(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def connect(port: int, words: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 30)
    connection.sendall(words)
    return connection


def hung_up(connection: socket.socket) -> bool:
    """Wait for the server to close a connection without an answer."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_metrics_and_nothing_else() -> None:
    with server(lambda: b"megascale_x 1\n") as one:
        status, text, headers = get(one.port)
        assert (status, text) == (200, b"megascale_x 1\n")
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert headers["Server"].strip() == "megascale"
        assert get(one.port, "/metrics?x=1")[0] == 200
        assert get(one.port, "/")[0] == 404
        assert get(one.port, "/../etc/passwd")[0] == 404
        assert get(one.port, method="POST")[0] == 501
        assert get(one.port, method="DELETE")[0] == 501


def test_many_requests_make_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(metrics_server, "FRESH_S", 300.0)

    def render() -> bytes:
        made.append(1)
        return b"x"

    with server(render) as one:
        for _ in range(20):
            assert get(one.port)[1] == b"x"
    assert len(made) == 1


def test_a_text_is_made_anew_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "FRESH_S", 0.0)
    texts = iter([b"1", b"2"])
    with server(lambda: next(texts)) as one:
        assert [get(one.port)[1] for _ in range(2)] == [b"1", b"2"]


def test_connections_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers who say nothing, or a little at a time, are closed; meanwhile more are turned away."""
    monkeypatch.setattr(metrics_server, "CONNECTION_S", 1.0)
    with server(lambda: b"x") as one:
        silent = [connect(one.port, b"GET /metr" if index % 2 else b"") for index in range(CONNECTIONS)]
        deadline = time.monotonic() + 30
        while True:  # until all places are taken
            with connect(one.port, b"GET /metrics HTTP/1.0\r\n\r\n") as late:
                if hung_up(late):
                    break
            assert time.monotonic() < deadline
        for connection in silent:
            assert hung_up(connection) or connection.recv(1000)
            connection.close()
        while get_or_none(one.port) != b"x":
            assert time.monotonic() < deadline


def get_or_none(port: int) -> bytes | None:
    try:
        return get(port)[1]
    except OSError:
        return None
    except http.client.HTTPException:
        return None


def test_a_slow_sender_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte is in time, the request never ends: the connection's own time counts."""
    monkeypatch.setattr(metrics_server, "CONNECTION_S", 1.0)
    with server(lambda: b"x") as one, connect(one.port, b"GET /metrics HTTP/1.0\r\n") as slow:
        with pytest.raises(OSError):
            for number in range(10**4):
                slow.sendall(b"X-%d: y\r\n" % number)
                time.sleep(0.05)
        assert get(one.port)[1] == b"x"


def test_long_requests_cost_no_memory() -> None:
    with server(lambda: b"x") as one:
        with connect(one.port) as long:
            try:
                for _ in range(64):
                    long.sendall(b"G" * (1 << 16))
                answer = long.recv(100)
            except OSError:
                answer = b""
            assert answer == b"" or b"414" in answer
        assert get(one.port)[1] == b"x"


def test_an_error_of_the_text_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def render() -> bytes:
        raise ValueError("a bug")

    with server(render, said) as one:
        for _ in range(2):
            with pytest.raises((http.client.HTTPException, OSError)):
                get(one.port)
    assert said == ["WARNING: metrics cannot be made: ValueError('a bug')"]


def test_the_next_free_port_is_taken() -> None:
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        one = MetricsServer(lambda: b"", "127.0.0.1", port, print)
        assert port < one.port < port + metrics_server.PORTS
        one.close()
        one.run()  # closes the socket


def test_no_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "PORTS", 1)
    with listen("127.0.0.1") as taken, pytest.raises(OSError, match="are in use"):
        MetricsServer(lambda: b"", "127.0.0.1", taken.getsockname()[1], print)


def test_an_end_before_the_beginning_waits_for_nobody() -> None:
    one = MetricsServer(lambda: b"", "127.0.0.1", free_port(), print)
    one.close()
    one.run()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{one.port}/metrics", timeout=10)
