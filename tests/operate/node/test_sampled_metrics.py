"""The samples of an agent: one that fails or hangs is said, and not served as if it were new."""

from __future__ import annotations

import asyncio
import functools
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from megascale.core.network import LOOPBACK, listen
from megascale.operate.channel.ends import AgentEnd, DriverEnd
from megascale.operate.channel.messages import Leave, Welcome
from megascale.operate.health.host_metrics import HostMetrics
from megascale.operate.node import agent
from megascale.operate.node.agent import Agent
from megascale.operate.node.ranks import NodePlace
from megascale.operate.store import metrics_server
from tests.operate.health.nodes import within


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def watch(folder: Path, found: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run an agent until what it serves is `found`; return what it has said."""
    monkeypatch.setattr(agent, "FIRST_SAMPLE_S", 0.0)
    monkeypatch.setattr(metrics_server, "FRESH_S", 0.0)
    with listen(LOOPBACK) as one:
        port = one.getsockname()[1]
    said: list[str] = []

    def served() -> str:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def look() -> None:
        until((folder / "prometheus" / "n0.json").exists)
        until(lambda: found(served()))

    async def test() -> None:
        end = DriverEnd()
        place = NodePlace("n0", LOOPBACK, "", 1, folder=folder)
        running = asyncio.ensure_future(Agent(place, functools.partial(AgentEnd, end), -1, say=said.append).run())
        await anext(end)
        end.send("n0", Welcome(0.1, 0.05, 300.0, 5.0, "run", str(folder), LOOPBACK, port))
        await asyncio.to_thread(look)
        end.send("n0", Leave(""))
        assert await within(running) == 0

    asyncio.run(test())
    return said


def test_a_sample_that_fails_is_said_once_and_the_next_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter(range(3))

    def sample(self: HostMetrics) -> dict[str, float]:
        if next(failures, None) is not None:
            raise OSError(5, "Input/output error")
        return {"cpu.load": 0.5}

    monkeypatch.setattr(HostMetrics, "sample", sample)
    monkeypatch.setattr(agent, "METRICS_S", 0.2)
    said = watch(tmp_path, lambda text: 'megascale_host_load1{node="n0",run="run"} 0.5' in text, monkeypatch)
    assert sum("no metrics of the host: OSError(5, 'Input/output error')" in line for line in said) == 1


def test_an_old_sample_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample hangs, as on a dead disk, once one before was served."""
    was_served: list[bool] = []

    def sample(self: HostMetrics) -> dict[str, float]:
        time.sleep(60 if was_served else 0)
        return {"cpu.load": 0.5}

    def found(text: str) -> bool:
        if "megascale_host_load1" in text:
            was_served.append(True)
        return bool(was_served) and "megascale_host_load1" not in text

    monkeypatch.setattr(HostMetrics, "sample", sample)
    monkeypatch.setattr(agent, "METRICS_S", 0.5)
    said = watch(tmp_path, found, monkeypatch)
    assert sum("no metrics of the host: TimeoutError()" in line for line in said) == 1
