"""An event store of two ranks, stages 0 and 1, which have trained four steps and were started anew after the second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megascale.core.storage import Location
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.store.tables import rows

MS = 1_000_000
EPOCH_NS = 1_700_000_000 * 10**9
STEPS = {0: (1, 2), 1: (3, 4)}
"""The steps of each attempt."""

KILLED = (0, 1, 3)
"""Attempt, rank and step of events whose step did not end."""

EVENTS = (
    ("host", "data", "", "", -1, 0, 2), ("compute", "F", "", "", 0, 2, 10), ("compute", "F", "", "", 1, 10, 18),
    ("tp", "all_gather", "qkv", "forward", 0, 3, 4), ("pp", "send", "", "forward", 0, 10, 11),
    ("pp", "receive", "", "backward", 0, 18, 20), ("compute", "R", "", "", 0, 20, 24),
    ("compute", "B", "", "", 0, 24, 36),
    ("compute", "B", "", "", 1, 36, 50), ("dp", "reduce_scatter", "chunk 0", "", -1, 40, 55),
    ("compute", "grad_norm", "", "", -1, 56, 60), ("compute", "update", "", "", -1, 60, 70),
    ("dp", "all_gather", "chunk 0", "", -1, 70, 80), ("host", "gc", "", "", -1, 80, 90),
    ("host", "evaluation", "", "", -1, 100, 130), ("host", "checkpoint", "", "", -1, 130, 140),
)  # fmt: skip
"""The events of a step: axis, name, part, direction, micro-batch, start and end in ms since the step's start."""


def write_store(folder: Path) -> Path:
    """Write the event store of a run, and return the run's folder."""
    for attempt, steps in STEPS.items():
        for rank in (0, 1):
            lost = [KILLED[2]] if (attempt, rank) == KILLED[:2] else []
            for table, columns in _tables(attempt, rank, steps, lost).items():
                write_rows(Location(str(folder / "events")), TableFile(table, f"node-{rank}", attempt, 1, 2), columns)
    return folder


def start_ns(attempt: int, rank: int, step: int) -> int:
    """Return when a step of a rank started; the clocks of ranks differ by a millisecond."""
    return EPOCH_NS + attempt * 10**10 + step * 200 * MS + rank * MS


def _tables(attempt: int, rank: int, steps: tuple[int, ...], lost: list[int]) -> dict[str, dict[str, list[Any]]]:
    who, node = {"attempt": attempt, "rank": rank}, {"node": f"node-{rank}", "host": f"host-{rank}"}
    starts = [start_ns(attempt, rank, step) for step in steps]
    of_step = [(step, event) for step in [*steps, *lost] for event in EVENTS]
    axis, name, part, direction, microbatch, start, end = (list(column) for column in zip(*EVENTS, strict=True))
    count = len(steps) + len(lost)
    begin = [start_ns(attempt, rank, step) for step, _ in of_step]
    return {
        "events": rows(
            "events", len(of_step), **who, step=[step for step, _ in of_step], axis=axis * count, name=name * count,
            part=part * count, direction=direction * count, microbatch=microbatch * count, layer=-1, chunk=-1,
            peer=[1 - rank if event[0] == "pp" else -1 for _, event in of_step],
            start_ns=[one + ms * MS for one, ms in zip(begin, start * count, strict=True)],
            end_ns=[one + ms * MS for one, ms in zip(begin, end * count, strict=True)], exposed_ns=MS,
        ),
        "steps": rows(
            "steps", len(steps), **who, step=list(steps), start_ns=starts, train_ns=90 * MS, loss=2.5, grad_norm=1.5,
            end_ns=[one + 140 * MS for one in starts], tokens=4096, tags="evaluation,checkpoint",
        ),
        "ranks": rows("ranks", **who, **node, world=2, pp=rank, pid=100 * attempt + rank),
    }  # fmt: skip
