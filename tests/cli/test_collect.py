"""The collector of a run's ranks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascale.cli import collect
from megascale.operate.channel.ends import DriverEnd
from megascale.operate.channel.messages import Heartbeat, Leave, Welcome
from megascale.record.rank_state import RankStatus


def test_it_ends_though_its_first_rank_was_gone_before_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel then gives it another parent, which it cannot take for the rank."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    reading, writing = os.pipe()
    os.close(writing)
    welcome = Welcome(1.0, 1.0, 0.0, 0.0, "run", str(tmp_path), "", 0)

    async def test() -> None:
        end = DriverEnd()
        end.outboxes["node"] = asyncio.Queue()
        beat = Heartbeat(time.time(), ranks=(RankStatus(0, ended.pid),))
        for _ in range(3):  # a greeting, then beats
            end.inbox.put_nowait(("node", beat))

        async def beats() -> None:
            while True:
                await asyncio.sleep(0.01)
                end.inbox.put_nowait(("node", beat))

        beating = asyncio.ensure_future(beats())
        await asyncio.wait_for(collect._drive(end, welcome, first=os.getppid()), 60)
        beating.cancel()
        sent = [end.outboxes["node"].get_nowait() for _ in range(end.outboxes["node"].qsize())]
        assert [type(message) for message in sent] == [Welcome, Leave]

    with open(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        asyncio.run(test())
