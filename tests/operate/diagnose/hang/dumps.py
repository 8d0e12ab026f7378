"""Dumps of the flight recorder, as torch 2.13 writes for NCCL groups (FlightRecorderDetail.hpp, version 2.10)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

START = 1_700_000_000
"""Start of the operations, in seconds since the epoch."""


class Recorder:
    """The record of a rank. `groups`: the groups' ranks, by description."""

    def __init__(self, rank: int, host: str, **groups: list[int]) -> None:
        self.rank = rank
        self.host = host
        self.groups = groups
        self.entries: list[dict[str, Any]] = []
        self._sequences = {name: [0, 0] for name in groups}

    def collective(self, group: str, name: str = "all_reduce", at: float = 0.0, done: bool = True) -> None:
        """Record a collective, started `at` seconds after START."""
        self._sequences[group][0] += 1
        self._add(group, name, at, done, False)

    def message(
        self, group: str, what: str, peer: int, at: float = 0.0, done: bool = True, batch: bool = False
    ) -> None:
        """Record a message. In a batch a message has no end, and the batch has a single sequence number."""
        ranks = self.groups[group]
        arrow = "->" if what == "send" else "<-"
        self._sequences[group][1] += not batch
        name = f"{what} {ranks.index(self.rank)}{arrow}{ranks.index(peer)}"
        self._add(group, name, at, done and not batch, True)

    def batch(self, group: str, *messages: tuple[str, int], at: float = 0.0, done: bool = True) -> None:
        """Record a batch of messages."""
        self._sequences[group][1] += 1
        for what, peer in messages:
            self._message(group, what, peer, at, done=False)  # only the batch has an end
        self._add(group, "coalesced", at, done, True)

    def _message(self, group: str, what: str, peer: int, at: float, done: bool) -> None:
        ranks = self.groups[group]
        arrow = "->" if what == "send" else "<-"
        self._add(group, f"{what} {ranks.index(self.rank)}{arrow}{ranks.index(peer)}", at, done, True)

    def _add(self, group: str, name: str, at: float, done: bool, point_to_point: bool) -> None:
        collective, message = self._sequences[group]
        created = int((START + at) * 1e9)
        self.entries.append({
            "frames": [{"name": "step", "filename": "megascale/train/step.py", "line": 70}],
            "record_id": len(self.entries),
            "pg_id": list(self.groups).index(group),
            "process_group": (f"hash of {group}", group),
            "thread_name": "python",
            "thread_id": "140378619902848",
            "collective_seq_id": collective,
            "p2p_seq_id": message,
            "op_id": len(self.entries) + 1,
            "profiling_name": f"nccl:{name}",
            "time_created_ns": created,
            "input_sizes": [[2, 2]],
            "input_dtypes": ["Float"],
            "output_sizes": [[2, 2]],
            "output_dtypes": ["Float"],
            "state": "completed" if done else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": created + 1000 if done else None,
            "retired": done,
            "timeout_ms": 600_000,
            "is_p2p": point_to_point,
        })  # fmt: skip

    def as_bytes(self) -> bytes:
        """Return the dump."""
        config = {
            f"hash of {name}": {"name": f"hash of {name}", "desc": name, "ranks": str(ranks)}
            for name, ranks in self.groups.items()
        }
        status = {"last_enqueued_collective": 1, "last_started_collective": -1, "last_completed_collective": 1}
        dump = {
            "version": "2.10",
            "pg_config": config,
            "comm_lib_version": "2.30.7",
            "pg_status": {str(i): status for i in range(len(self.groups))},
            "entries": self.entries,
        }
        return pickle.dumps(dump, protocol=2)

    def write(self, folder: Path) -> None:
        """Write the dump to a folder, with the name that TORCH_FR_DUMP_TEMP_FILE gives."""
        (folder / f"{self.host}_rank_{self.rank}").write_bytes(self.as_bytes())
