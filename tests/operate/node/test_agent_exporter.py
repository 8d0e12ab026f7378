"""The exporter of an agent, in real agents with a scripted driver."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from megascale.core.network import listen
from megascale.operate.channel.messages import Heartbeat, Welcome
from tests.operate.health.nodes import Driver, node, within

Labels = frozenset[tuple[str, str]]


def welcome(folder: Path, port: int) -> Welcome:
    return Welcome(0.1, 0.05, 300.0, 5.0, "run", str(folder), "127.0.0.1", port)


def free_port() -> int:
    with listen("127.0.0.1") as one:
        return int(one.getsockname()[1])


async def scrape(port: int) -> dict[tuple[str, Labels], float]:
    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    families = text_string_to_metric_families(await asyncio.to_thread(get))
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


async def until(found: Callable[[], bool], ours: Driver) -> None:
    """Wait, and take heartbeats meanwhile."""

    async def look() -> None:
        while not found():
            await ours.until(Heartbeat)

    await within(look())


def ranks_of(samples: dict[tuple[str, Labels], float], name: str) -> set[str]:
    return {dict(labels)["rank"] for metric, labels in samples if metric == name}


def test_ranks_host_and_driver_and_a_rank_that_is_gone(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as (ours, _):
            port = free_port()
            ours.send(welcome(tmp_path, port))
            pids = await ours.start(tmp_path, (0, 1))
            targets = tmp_path / "prometheus" / "n0.json"
            await until(targets.exists, ours)
            assert json.loads(targets.read_text())[0]["targets"] == [f"127.0.0.1:{port}"]
            while ranks_of(first := await scrape(port), "megascale_rank_step") != {"0", "1"}:  # found twice a second
                await ours.until(Heartbeat)
            here = frozenset({("run", "run"), ("node", "n0")})
            assert first["megascale_agent_driver_lost_seconds", here] == 0
            assert first["megascale_world_size", here] == 2
            while ("megascale_host_load1", here) not in await scrape(port):
                await ours.until(Heartbeat)
            os.kill(pids[1], signal.SIGKILL)
            await ours.end_of(1)
            while ranks_of(await scrape(port), "megascale_rank_step") != {"0"}:  # a text may be a second old
                await ours.until(Heartbeat)

    asyncio.run(test())


def test_heartbeats_go_on_while_strangers_hold_all_connections(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as (ours, _):
            port = free_port()
            ours.send(welcome(tmp_path, port))
            await ours.start(tmp_path, (0, 1))
            await until((tmp_path / "prometheus" / "n0.json").exists, ours)
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
            before = await ours.until(Heartbeat)
            for _ in range(20):
                after = await ours.until(Heartbeat)
            assert all(a.step > b.step for a, b in zip(after.ranks, before.ranks, strict=True))
            for _, writer in held:
                writer.close()

    asyncio.run(test())


def test_no_port_and_an_address_of_another_host(tmp_path: Path) -> None:
    """Nothing is served, and the agent goes on; what it could not do is one line, however often a driver asks."""

    async def test() -> None:
        async with node(tmp_path) as (ours, agent):
            ours.send(welcome(tmp_path, 0))
            await ours.start(tmp_path, (0, 1))
            for _ in range(2):
                ours.send(Welcome(0.1, 0.05, 300.0, 5.0, "run", str(tmp_path), "192.0.2.1", 9400))
                await until(lambda: "WARNING: no metrics at 192.0.2.1:9400" in agent.log.read_text(), ours)
            before, after = await ours.until(Heartbeat), await ours.until(Heartbeat)
            assert [status.pid for status in after.ranks] == [status.pid for status in before.ranks]
            assert agent.log.read_text().count("metrics at") == 1
        assert not (tmp_path / "prometheus").exists()

    asyncio.run(test())
