"""Folders of runs whose ranks hang, with the states of a simulated job in the event store."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lab.hanging_worlds import Fault, HangingWorld, Workload, step_calls
from megascale.core.storage import Location
from megascale.layout.topology import Topology
from megascale.operate.store.table_files import TableFile, write_rows
from megascale.record.rank_state import RankState
from tests.operate.show.folders import make_run
from tests.operate.store.tables import rows

TOPOLOGY = Topology(tp=2, pp=2, dp=2)
CULPRIT = 5


def hanging_records(kind: str = "hang", idle_s: float = 60.0, topology: Topology = TOPOLOGY) -> dict[int, RankState]:
    """The records of a job whose rank 5 hangs before a tensor-parallel collective of step 2, for `idle_s` seconds."""
    calls = step_calls(topology, CULPRIT, Workload())
    at = len(calls) + next(index for index, call in enumerate(calls) if call.key == "tp")
    records = HangingWorld(topology, Fault(kind, CULPRIT, at)).records()
    return {
        rank: replace(record, updated_ns=record.read_ns - int(idle_s * 1e9), phase_since_ns=record.updated_ns)
        for rank, record in records.items()
    }


def make_hung_run(folder: Path, records: Mapping[int, RankState] | None = None) -> Path:
    """Write the folder of a run of eight ranks, four on a node, with the states of `records` in its store."""
    run = make_run(folder, parallel__dp=2, batch__global=16)
    write_states(run, hanging_records() if records is None else records)
    return run


def write_states(run: Path, records: Mapping[int, RankState], age_s: float = 5.0) -> None:
    """Write the tables of states and of ranks."""
    texts = [json.dumps(record.to_dict()) for record in records.values()]
    when = int((time.time() - age_s) * 1e9)
    store, ranks = Location(f"{run}/events"), list(records)
    write_rows(store, TableFile("states", "n", 0, 0, 1), rows("states", len(ranks), rank=ranks, time_ns=when,
               record=texts))  # fmt: skip
    nodes = [f"node{rank // 4}" for rank in ranks]
    write_rows(store, TableFile("ranks", "n", 0, 0, 1), rows("ranks", len(ranks), rank=ranks, node=nodes))
