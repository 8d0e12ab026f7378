"""A real Prometheus on loopback, which finds its targets in the folders of runs."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megascale.core.network import listen

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "configs" / "observe" / "prometheus.yml"
SECONDS = 120.0


class Prometheus:
    """A server, and questions to it."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of the API. Raises: AssertionError with the server's message"""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of a query now."""
        return list(self.get("query", query=expression)["result"])

    def wait_for(self, expression: str, holds: Callable[[list[dict[str, Any]]], object] = bool) -> list[dict[str, Any]]:
        """Return the series of a query once it has some that are as wanted."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                if holds(found := self.query(expression)):
                    return found
            except OSError:
                found = []
            assert time.monotonic() < deadline, f"in vain: {expression}: {found}"
            time.sleep(0.2)


@contextmanager
def prometheus(folder: Path, runs: Sequence[Path]) -> Iterator[Prometheus]:
    """Start a server by the example configuration of configs/observe, with scrapes every second."""
    text = EXAMPLE.read_text()
    files = ", ".join(f"{run}/prometheus/*.json" for run in runs)
    for old, new in (
        ("15s", "1s"),
        ("alerts.yml", str(EXAMPLE.with_name("alerts.yml"))),
        ("/path/to/run/prometheus/*.json", files),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "prometheus.yml").write_text(text)
    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with open(folder / "prometheus.log", "w") as log:
        process = subprocess.Popen(
            ["prometheus", *words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait()
