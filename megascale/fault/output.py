"""Rank 0's output, which `megascale launch` shows: read from its log, so it outlives drivers and crosses hosts."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import IO

POLL_S = 0.2

LOG = "attempt-{attempt}/rank-0.log"
"""File of rank 0's output in the folder of logs."""


async def follow_rank_0(logs: Path, attempt: int, stream: IO[str]) -> None:
    """Copy rank 0's output to a stream, of one attempt after another from `attempt` on; once more when cancelled."""
    offset = 0
    try:
        while True:
            offset = _copy(logs / LOG.format(attempt=attempt), offset, stream)
            later = _next_attempt(logs, attempt)
            if later is not None:
                _copy(logs / LOG.format(attempt=attempt), offset, stream)
                attempt, offset = later, 0
            else:
                await asyncio.sleep(POLL_S)
    finally:
        _copy(logs / LOG.format(attempt=attempt), offset, stream)


def _next_attempt(logs: Path, attempt: int) -> int | None:
    """Return the first attempt after `attempt` that has output."""
    names = (path.parent.name.removeprefix("attempt-") for path in logs.glob(LOG.format(attempt="*")))
    return min((int(name) for name in names if name.isdecimal() and int(name) > attempt), default=None)


def _copy(log: Path, offset: int, stream: IO[str]) -> int:
    """Copy a log from `offset` on, and return its end. An absent log is empty; a closed terminal is no error."""
    try:
        with open(log, "rb") as file:
            file.seek(offset)
            text = file.read()
    except OSError:
        return offset
    end = text.rfind(b"\n") + 1  # whole lines: the driver prints in between
    if end:
        with contextlib.suppress(OSError, ValueError):
            stream.write(text[:end].decode(errors="replace"))
            stream.flush()
    return offset + end
