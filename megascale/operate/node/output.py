"""Rank 0's output, which `megascale launch` shows: read from its log, so it outlives drivers and crosses hosts."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import IO, BinaryIO

POLL_S = 0.2

LOG = "attempt-{attempt}/rank-0.log"  # file of rank 0's output in the folder of logs


async def follow_rank_0(logs: Path, attempt: int, stream: IO[str]) -> None:
    """Copy rank 0's output to a stream, of one attempt after another from `attempt` on; once more when cancelled."""
    log = _Log(logs / LOG.format(attempt=attempt))
    try:
        while True:
            names = (path.parent.name.removeprefix("attempt-") for path in logs.glob(LOG.format(attempt="*")))
            later = min((int(name) for name in names if name.isdecimal() and int(name) > attempt), default=None)
            log.copy(stream)
            if later is not None:
                attempt = later
                log.close()
                log = _Log(logs / LOG.format(attempt=attempt))
            else:
                await asyncio.sleep(POLL_S)
    finally:
        log.copy(stream)
        log.close()


class _Log:
    """A log that may not be there yet. It stays open once it is: the run's folder may be renamed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def copy(self, stream: IO[str]) -> None:
        """Copy what the log has more, whole lines: the driver prints in between. A closed terminal is no error."""
        with contextlib.suppress(OSError):
            self._file = self._file or open(self._path, "rb")  # noqa: SIM115  closed by `close`
            start, text = self._file.tell(), self._file.read()
            end = text.rfind(b"\n") + 1
            self._file.seek(start + end)
            with contextlib.suppress(OSError, ValueError):
                stream.write(text[:end].decode(errors="replace"))
                stream.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
