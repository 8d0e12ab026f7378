"""The gate and the server: no byte without the token, and a bounded number of connections."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask import Flask

from megascale.operate.show.web import server
from megascale.operate.show.web.app import make_app
from megascale.operate.show.web.runs import watched_runs
from megascale.operate.show.web.server import DashboardServer
from megascale.operate.show.web.token_gate import MAX_REQUEST_BYTES
from tests.operate.show.folders import make_run

TOKEN = "a token of this test"
PATHS = (
    "/",
    "/_dash-layout",
    "/_dash-dependencies",
    "/assets/dashboard.css",
    "/perfetto.json",
    "/_dash-component-suites/x",
)


@pytest.fixture
def app(tmp_path: Path) -> Flask:
    return make_app(watched_runs([make_run(tmp_path)]), TOKEN, "cookie").server


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("given", ["", "?token=", "?token=a", f"?token={TOKEN}x", "?token=%C3%A9"])
def test_without_the_token_nothing_is_said(path: str, given: str, app: Flask) -> None:
    for answer in (app.test_client().get(path + given), app.test_client().post(path + given, json={})):
        assert (answer.status_code, answer.data) == (403, b"Forbidden\n")
        assert "Set-Cookie" not in answer.headers


def test_the_token_becomes_a_cookie_and_leaves_the_address(app: Flask) -> None:
    client = app.test_client()
    answer = client.get("/", query_string={"token": TOKEN})
    assert (answer.status_code, answer.headers["Location"]) == (302, "/")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    page = client.get("/")
    assert page.status_code == 200
    assert TOKEN.encode() not in page.data
    assert client.get("/assets/dashboard.css").status_code == 200


def test_nothing_is_loaded_from_elsewhere(app: Flask) -> None:
    client = app.test_client()
    client.get("/", query_string={"token": TOKEN})
    page = client.get("/")
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    assert not re.search(r"(src|href)=[\"'](https?:)?//", page.text)
    assert client.get("/_dash-layout").headers["Referrer-Policy"] == "no-referrer"


def test_a_request_has_a_largest_size(app: Flask) -> None:
    client = app.test_client()
    client.get("/", query_string={"token": TOKEN})
    answer = client.post(
        "/_dash-update-component", data=b"x" * (MAX_REQUEST_BYTES + 1), content_type="application/json"
    )
    assert answer.status_code == 413


@pytest.fixture
def address(app: Flask) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, DashboardServer(listener, app) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield listener.getsockname()
        running.shutdown()
        thread.join()


def test_the_server_prints_no_address(address: tuple[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("GET", f"/?token={TOKEN.replace(' ', '%20')}")
    assert connection.getresponse().status == 302
    connection.close()
    assert capsys.readouterr() == ("", "")


def test_connections_beyond_the_bound_wait(app: Flask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
    with socket.create_server(("127.0.0.1", 0)) as listener, DashboardServer(listener, app) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        idle = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        third = http.client.HTTPConnection(*listener.getsockname(), timeout=0.5)
        third.request("GET", "/")
        with pytest.raises(TimeoutError):
            third.getresponse()
        for connection in idle:
            connection.close()
        after = http.client.HTTPConnection(*listener.getsockname(), timeout=30)
        after.request("GET", "/")
        assert after.getresponse().status == 403
        running.shutdown()
