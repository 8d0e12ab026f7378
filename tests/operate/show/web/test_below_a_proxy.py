"""The dashboard below the path of a reverse proxy that strips the path, or keeps it."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

from megascale.cli.main import parse
from megascale.operate.show.web.app import make_app
from megascale.operate.show.web.runs import watched_runs
from megascale.operate.show.web.server import DashboardServer
from tests.operate.show.stores import make_stored_run
from tests.operate.show.web.chromium import Browser, dashboard, needs_chromium
from tests.operate.show.web.client import callback_request
from tests.operate.show.web.proxies import BASE, Portal, portal

TOKEN = "a-token"


class Visitor:
    """A browser's requests to a portal: with cookies, and following redirects."""

    def __init__(self, here: Portal) -> None:
        self.origin = here.url
        self.cookies = CookieJar()
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))

    def get(self, path: str, body: dict[str, object] | None = None) -> tuple[str, bytes]:
        """Return the address of an answer and its bytes."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(urljoin(self.origin, path), data, {"Content-Type": "application/json"})
        with self._opener.open(request, timeout=600) as answer:
            return answer.url, answer.read()


@pytest.fixture(params=["strips", "keeps"])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Portal]:
    run, _ = make_stored_run(tmp_path)
    runs = watched_runs([run])
    app = make_app(runs, TOKEN, "cookie", BASE)
    with socket.create_server(("127.0.0.1", 0)) as listener, DashboardServer(listener, app.server) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with portal(listener.getsockname()[1], strips=request.param == "strips") as found:
            yield found
        server.shutdown()
        thread.join()
    for each in runs.values():
        each.close()


@pytest.mark.parametrize("entry", [f"{BASE}?token={TOKEN}", f"{BASE.rstrip('/')}?token={TOKEN}"])
def test_every_address_of_the_page_is_below_the_path(here: Portal, entry: str) -> None:
    visitor = Visitor(here)
    address, page = visitor.get(entry)
    assert address == urljoin(here.url, BASE), "without the token"
    addresses = re.findall(r"(?:src|href)=[\"']([^\"']+)", page.decode())
    assert len(addresses) > 5
    for each in addresses:
        assert urlsplit(urljoin(address, each)).path.startswith(BASE)
        assert visitor.get(each)[1]
    assert (
        json.loads(re.findall(r'_dash-config"[^>]*>(.*?)</script>', page.decode())[0])["requests_pathname_prefix"]
        == BASE
    )


def test_pages_and_downloads_answer_below_the_path(here: Portal) -> None:
    visitor = Visitor(here)
    visitor.get(f"{BASE}?token={TOKEN}")
    dependencies = json.loads(visitor.get(f"{BASE}_dash-dependencies")[1])
    values = {"run.value": "test", "picked.data": 0, "order.value": "pp", "step.value": 60, "step-count.value": 1}

    def ask(output: str) -> dict[str, dict[str, object]]:
        body = callback_request(dependencies, output, values)
        return json.loads(visitor.get(f"{BASE}_dash-update-component", body)[1])["response"]

    assert "test" in json.dumps(ask("header.children"))
    link = str(ask("download.href")["download"]["href"])
    assert link.startswith(f"{BASE}perfetto.json?run=test&")
    assert "traceEvents" in json.loads(visitor.get(link)[1])


def test_the_cookie_goes_nowhere_else_and_frames_are_of_the_same_origin(here: Portal) -> None:
    visitor = Visitor(here)
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        visitor.get(BASE)
    assert "frame-ancestors 'self'" in refused.value.headers["Content-Security-Policy"]
    assert "X-Frame-Options" not in refused.value.headers
    visitor.get(f"{BASE}?token={TOKEN}")
    assert [cookie.path for cookie in visitor.cookies] == [BASE]
    visitor.get("/")
    assert here.cookies == [""], "another user's program may answer there"


@pytest.mark.parametrize(
    "text", ["proxy/8050", "//evil.example/", "/a//b/", "/a?b", "/a b/", "/a/../b#", "http://h/a/"]
)
def test_what_is_no_path_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["dashboard", "run", "--base-path", text])
    assert "is not the path of an address, such as /proxy/8050/" in capsys.readouterr().err


def test_a_path_ends_with_a_slash() -> None:
    _, options = parse(["dashboard", "run", "--base-path", "/user/a@b/proxy/8050"])
    assert options.base_path == "/user/a@b/proxy/8050/"


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("strips", [True, False])
def test_the_dashboard_in_a_frame_of_a_portal(tmp_path: Path, strips: bool) -> None:
    run, _ = make_stored_run(tmp_path)
    with dashboard(run, "--base-path", BASE) as url, Browser() as browser:
        parts = urlsplit(url)
        assert parts.path == BASE
        with portal(int(parts.port or 0), strips=strips) as found:
            found.query = f"?{parts.query}"
            browser.open(found.url)
            browser.driver.switch_to.frame("frame")
            browser.wait_for(lambda: browser.text("#values"), "the overview")
            browser.open_tab("Heat map")
            browser.wait_for(lambda: browser.traces("heat-map"), "the heat map")
            assert browser.hosts() == {urlsplit(found.url).netloc}
            assert browser.errors() == []
