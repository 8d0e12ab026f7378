"""Where servers listen, by the name under which other hosts reach this one."""

from __future__ import annotations

import socket

import pytest

from megascale.core.network import LOOPBACK, address_toward, is_loopback, listen, listen_as

ANY = "0.0.0.0"


@pytest.mark.parametrize(
    ("name", "resolved", "expected"),
    [
        (LOOPBACK, LOOPBACK, LOOPBACK),
        ("localhost", LOOPBACK, LOOPBACK),
        ("node7", "127.0.1.1", ANY),  # Debian's own name: the other hosts do not reach it there
        ("service", "203.0.113.9", ANY),  # an address of another machine, which passes connections on
    ],
)
def test_a_server_listens_where_the_others_reach_it(
    name: str, resolved: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with listen_as(name) as listener:
        assert listener.getsockname()[0] == expected


def test_a_port_that_is_taken_is_not_opened_elsewhere() -> None:
    with listen(LOOPBACK) as taken, pytest.raises(OSError, match="in use"):
        listen_as(LOOPBACK, taken.getsockname()[1])


def test_addresses() -> None:
    assert address_toward(LOOPBACK) == LOOPBACK
    assert is_loopback("127.8.9.10") and is_loopback("::1")
    assert not is_loopback("10.0.0.1") and not is_loopback("localhost")
