"""The scheduler in another process: calls of any size, beats of the driver's event loop, and the job's end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from megascale.core.errors import MegascaleError
from megascale.operate.driver import supervisor
from megascale.operate.driver.scheduler import remote
from megascale.operate.driver.scheduler.none import NoScheduler
from megascale.operate.driver.scheduler.port import Node, Scheduler, SchedulerError
from megascale.operate.driver.scheduler.remote import SchedulerClient, serve


def test_a_client_beats_and_its_calls_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BEAT_S", 0.01)

    async def body() -> None:
        ours, theirs = socket.socketpair()
        beats: list[None] = []
        serving = asyncio.ensure_future(serve(NoScheduler(), ours, lambda: beats.append(None)))
        client = await SchedulerClient.connect(theirs)
        assert await client.nodes() == []
        assert await client.without_agent() == ()
        while len(beats) < 3:
            await asyncio.sleep(0.01)
        await client.close()
        await serving

    asyncio.run(asyncio.wait_for(body(), 30))


class ManyNodes(NoScheduler):
    """Holds more nodes than ever trained a model."""

    def __init__(self) -> None:
        self.excluded: list[tuple[str, str, float | None]] = []

    async def nodes(self) -> Sequence[Node]:
        return [Node(f"ip-10-12-{i}", f"ip-10-12-{i}.us-west-2.compute.internal") for i in range(20_000)]

    async def exclude(self, node: str, reason: str, until: float | None) -> None:
        self.excluded.append((node, reason, until))

    async def release(self, node: str) -> None:
        raise FileNotFoundError(2, "No such file or directory", "scontrol")


def connected(
    scheduler: Scheduler, test: Callable[[SchedulerClient], Awaitable[None]], **heard: Callable[..., Any]
) -> None:
    """Run a test with the client of a scheduler that is served, until the client hangs up."""

    async def body() -> None:
        ours, theirs = socket.socketpair()
        serving = asyncio.ensure_future(serve(scheduler, ours, **heard))
        client = await SchedulerClient.connect(theirs)
        await test(client)
        await client.close()
        await serving

    asyncio.run(asyncio.wait_for(body(), 30))


def test_the_nodes_of_a_large_job_and_a_long_reason_pass() -> None:
    scheduler = ManyNodes()

    async def test(client: SchedulerClient) -> None:
        assert await client.nodes() == await scheduler.nodes()
        await client.exclude("n1", "failed: " + "x" * (1 << 20), 5.0)
        ((node, reason, until),) = scheduler.excluded
        assert (node, until) == ("n1", 5.0)
        assert reason.startswith("failed: xxx") and len(reason) == remote.MOST_REASON

    connected(scheduler, test)


def test_an_error_of_the_system_is_an_answer() -> None:
    async def test(client: SchedulerClient) -> None:
        with pytest.raises(SchedulerError, match=r"release: .*No such file or directory: 'scontrol'"):
            await client.release("n1")

    connected(ManyNodes(), test)


def test_whoever_waits_hears_of_an_answer_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the supervisor outlives a call that it cannot read."""

    async def test(client: SchedulerClient) -> None:
        waiting = asyncio.ensure_future(client.next_end())
        with pytest.raises(MegascaleError, match="the supervisor has ended"):
            await client.nodes()
        with pytest.raises(MegascaleError, match="the supervisor has ended"):
            await waiting

    monkeypatch.setattr(remote, "MOST_LINE_BYTES", 1 << 16)
    connected(ManyNodes(), test)

    async def send_too_much(client: SchedulerClient) -> None:
        with pytest.raises(MegascaleError, match="the supervisor has ended"):
            await client.start_agent("x" * (1 << 18))

    connected(ManyNodes(), send_too_much)
    assert "the driver sent what is no call of a scheduler" in capfd.readouterr().err


def test_the_end_of_the_job_is_heard_before_the_driver_hangs_up() -> None:
    ends: list[int] = []

    async def test(client: SchedulerClient) -> None:
        client.report_end(93)

    connected(NoScheduler(), test, ended=ends.append)
    assert ends == [93]


def test_a_pulse_ends_after_looks_without_a_beat_but_not_before_the_first() -> None:
    pulse = supervisor._Pulse()
    assert all(pulse.look() for _ in range(1000)), "a driver that imports has not beaten yet"
    pulse.beat()
    assert all(pulse.look() for _ in range(supervisor.SILENT_S))
    assert not pulse.look()
    pulse.beat()
    assert pulse.look()
