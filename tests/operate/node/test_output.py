"""Rank 0's output is shown line by line, attempt after attempt."""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path

from megascale.operate.node.output import follow_rank_0


def write(logs: Path, attempt: int, text: str) -> None:
    folder = logs / f"attempt-{attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "rank-0.log", "a") as file:
        file.write(text)


async def follow(logs: Path, out: io.StringIO) -> None:
    task = asyncio.ensure_future(follow_rank_0(logs, 3, out))
    write(logs, 2, "an earlier launch\n")
    write(logs, 3, "step 1\nste")
    while "step 1" not in out.getvalue():
        await asyncio.sleep(0.01)
    assert out.getvalue() == "step 1\n", "whole lines only"
    write(logs, 3, "p 2\n")
    write(logs, 5, "step 3\n")  # no rank of attempt 4 was started
    while "step 3" not in out.getvalue():
        await asyncio.sleep(0.01)
    renamed = logs.rename(logs.with_name("away"))
    write(renamed, 5, "saved\n")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_output_of_all_attempts_of_a_launch_is_shown_whole(tmp_path: Path) -> None:
    out = io.StringIO()
    asyncio.run(asyncio.wait_for(follow(tmp_path / "logs", out), 60))
    assert out.getvalue() == "step 1\nstep 2\nstep 3\nsaved\n"
