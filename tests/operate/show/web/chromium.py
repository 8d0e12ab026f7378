"""A dashboard as a user starts it, and Chromium that looks at it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import heed_signals

SECONDS = 240
needs_chromium = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="needs Debian's packages chromium and chromium-driver",
)


@contextlib.contextmanager
def dashboard(*words: Path | str) -> Iterator[str]:
    """Start `megascale dashboard`, and yield its URL; end it by Ctrl-C, which is an end in order."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megascale", "dashboard", *map(str, words), "--port", "0"],
        env=dict(os.environ, OMP_NUM_THREADS="1"), stdout=subprocess.PIPE, text=True, preexec_fn=heed_signals,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield re.search(r"http://\S+", process.stdout.readline())[0]
        process.send_signal(2)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()


TRACES = """
const plain = value => !value ? value : value._inputArray ? plain(value._inputArray)
    : ArrayBuffer.isView(value) ? Array.from(value) : Array.isArray(value) ? value.map(plain) : value;
const graph = document.querySelector('#' + arguments[0] + ' .js-plotly-plot');
const traces = graph && graph.data ? graph.data : [];
return traces.map(trace => Object.fromEntries(Object.entries(trace).map(([key, value]) => [key, plain(value)])));
"""
"""The traces of a plot, with typed arrays as lists."""


class Browser:
    """Headless Chromium."""

    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(word)
        options.add_argument("--window-size=1360,1000")
        options.binary_location = str(shutil.which("chromium"))
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.driver.quit()

    def open(self, url: str) -> None:
        """Open a page, without messages of the page before, which may still ask a server that has ended."""
        self.driver.get("about:blank")
        self.errors()
        self.driver.get(url)

    def run(self, script: str, *arguments: object) -> Any:
        """Run JavaScript in the page."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """The text of an element, "" while there is none."""
        return str(self.run("return (document.querySelector(arguments[0]) || {innerText: ''}).innerText", selector))

    def has(self, selector: str) -> bool:
        """Return True if there is such an element."""
        return bool(self.run("return !!document.querySelector(arguments[0])", selector))

    def open_tab(self, title: str) -> None:
        """Click on a tab."""
        self.run("[...document.querySelectorAll('.tab')].find(e => e.innerText == arguments[0]).click()", title)

    def traces(self, graph: str) -> list[dict[str, Any]]:
        """What a graph draws, [] while it draws nothing."""
        return self.run(TRACES, graph) or []

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Return the condition's value once it is true."""
        deadline = time.monotonic() + SECONDS
        while not (value := condition()):
            assert time.monotonic() < deadline, f"{what}: {self.text('body')[:3000]} {self.errors()}"
            time.sleep(0.2)
        return value

    def errors(self) -> list[str]:
        """Messages of the console since the last call, but for those of no consequence."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    def hosts(self) -> set[str]:
        """The hosts that anything was loaded from."""
        loaded = "performance.getEntries().map(e => e.name).filter(name => name.startsWith('http'))"
        return set(self.run(f"return {loaded}.map(name => new URL(name).host)"))
