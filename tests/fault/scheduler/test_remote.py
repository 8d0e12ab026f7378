"""The scheduler in another process: beats say that the driver's event loop runs."""

from __future__ import annotations

import asyncio
import socket

import pytest

from megascale.fault import supervisor
from megascale.fault.scheduler import remote
from megascale.fault.scheduler.none import NoScheduler
from megascale.fault.scheduler.remote import SchedulerClient, serve


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


def test_a_pulse_ends_after_looks_without_a_beat_but_not_before_the_first() -> None:
    pulse = supervisor._Pulse()
    assert all(pulse.look() for _ in range(1000)), "a driver that imports has not beaten yet"
    pulse.beat()
    assert all(pulse.look() for _ in range(supervisor.SILENT_S))
    assert not pulse.look()
    pulse.beat()
    assert pulse.look()
