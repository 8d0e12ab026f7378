"""Jobs whose ranks keep flight records that a test reads from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from megascale.operate.channel.secret import SECRET_VARIABLE, new_secret
from megascale.record.log_files import FLIGHT_RECORD_VARIABLE
from megascale.record.log_reader import read_state
from megascale.record.rank_state import LogError, RankState

SECONDS = 180


class RecordedJob:
    """The ranks of `megascale train`, each a child process with a flight record in `folder`. `site`: Python code that
    every rank runs at its start, such as a fault.
    """

    def __init__(
        self, config: Path, world: int, folder: Path, site: str = "", env: dict[str, str] | None = None
    ) -> None:
        self.world = world
        self.paths = [folder / f"rank-{rank}.flight" for rank in range(world)]
        self.logs = [folder / f"rank-{rank}.log" for rank in range(world)]
        (folder / "site").mkdir(parents=True)
        (folder / "site" / "sitecustomize.py").write_text(site)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        common = dict(os.environ, OMP_NUM_THREADS="1", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), SECRET_VARIABLE: new_secret()}
        common |= {"GLOO_SOCKET_IFNAME": "lo"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "megascale", "train", str(config)],
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), FLIGHT_RECORD_VARIABLE: str(path)},
                stdout=subprocess.DEVNULL,
                stderr=self.logs[rank].open("wb"),
            )
            for rank, path in enumerate(self.paths)
        ]

    def __enter__(self) -> RecordedJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def records(self) -> dict[int, RankState]:
        """The records that can be read, by rank."""
        found = {}
        for rank, path in enumerate(self.paths):
            try:
                found[rank] = read_state(path)
            except (LogError, OSError):
                continue
        return found

    def states(self) -> dict[int, str]:
        """The letters of the processes' states in /proc, by rank."""
        stats = {rank: Path(f"/proc/{process.pid}/stat") for rank, process in enumerate(self.ranks)}
        return {rank: path.read_text().rpartition(")")[2].split()[0] for rank, path in stats.items()}

    def wait_for(self, condition: Callable[[dict[int, RankState]], bool]) -> dict[int, RankState]:
        """Return the records once all ranks have one and the condition is true."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            records = self.records()
            if len(records) == self.world and condition(records):
                return records
            ended = [rank for rank, process in enumerate(self.ranks) if process.poll() is not None]
            assert not ended, f"ranks {ended} have ended: {self.logs[ended[0]].read_text()[-2000:]}"
            signal.sigtimedwait([], 0.1)
        raise AssertionError(f"no such records: {self.records()}")

    def wait_for_hang(self, after_step: int = 1, seconds: float = 3.0) -> dict[int, RankState]:
        """Return the records once all ranks are in a step or beyond it, and none has made progress for `seconds`."""
        return self.wait_for(lambda records: all(r.step >= after_step and r.idle_s > seconds for r in records.values()))
