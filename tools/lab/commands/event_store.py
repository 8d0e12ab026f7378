"""The event store of a job of 12,288 ranks: its bytes, and the time of each ready query and of the analyses.

The job is synthetic: the schedule, the steps' parts and the messages of the paper's largest job, without a model. With
--hang also a verdict about as many flight records of which one hangs, from the tests' simulation of such jobs.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.fleet import Fleet
from lab.fleet_tables import write_store
from lab.fleet_times import FleetFault
from lab.observe_cases import LARGE
from megascale.layout.topology import Topology
from megascale.operate.diagnose.hang.hang import hang_verdict
from megascale.operate.diagnose.slow.cube_queries import recent_cube
from megascale.operate.diagnose.slow.findings import findings
from megascale.operate.diagnose.slow.heatmap import heat_map
from megascale.operate.store.query import answer, open_store
from megascale.operate.store.ready_queries import READY_QUERIES

SLOW_RANK, HUNG_RANK = 4321, 5000
PAPER_STEP_S = 6.34
"""Seconds of a step of 12,288 GPUs in the paper (table 2)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--steps", type=int, default=20, help="steps of the job (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=192, help="replicas of 64 ranks (default: %(default)s)")
    parser.add_argument("--hang", action="store_true", help="also time the verdict about a job that hangs")


def run(options: argparse.Namespace) -> int:
    """Make the store, time it, and print the tables."""
    topology = Topology(tp=8, pp=8, dp=options.replicas)
    with tempfile.TemporaryDirectory(prefix="megascale-store-") as scratch:
        run = Path(scratch)
        layout = replace(LARGE, steps=options.steps, topology=topology)
        fault = FleetFault("slow", rank=min(SLOW_RANK, topology.world_size - 1), factor=1.1)
        fleet = Fleet(layout, 1, fault, events=1)
        write_store(fleet, run)
        rows = {name: len(columns["rank"]) for name, columns in fleet.tables.items()}
        del fleet
        print(*sizes(run, rows, topology.world_size, options.steps), "", sep="\n", flush=True)
        print("| query or analysis | seconds | answer |\n|---|---|---|")
        print(*timed_queries(run), *timed_analyses(run), sep="\n", flush=True)
    if options.hang:
        print(*timed_verdict(topology), sep="\n", flush=True)
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20):.1f} GiB")
    return 0


def sizes(run: Path, rows: dict[str, int], world: int, steps: int) -> Iterator[str]:
    """Yield the bytes of each table, of a rank and step, and of a rank and second with the paper's steps."""
    yield f"{world:,} ranks, {steps} steps; messages of 1 step"
    yield "\n| table | rows | MB | bytes a rank and step | bytes a rank and second |\n|---|---|---|---|---|"
    for table in ("steps", "step_parts", "events"):
        size = sum(path.stat().st_size for path in (run / "events" / table).rglob("*.parquet"))
        each = size / world / (1 if table == "events" else steps)
        yield f"| {table} | {rows[table]:,} | {size / 1e6:.1f} | {each:.0f} | {each / PAPER_STEP_S:.1f} |"


def timed(name: str, call: Callable[[], Any], describe: Callable[[Any], str]) -> str:
    """Time a call, and return a line of a table."""
    started = time.perf_counter()
    found = call()
    return f"| {name} | {time.perf_counter() - started:.2f} | {describe(found)} |"


def timed_queries(run: Path) -> Iterator[str]:
    """Yield the time of each ready query."""
    for name, query in READY_QUERIES.items():
        ask = partial(answer, open_store(run), query.sql)
        yield timed(f"`{name}`", ask, lambda got: f"{len(got.rows)} rows")


def timed_analyses(run: Path) -> Iterator[str]:
    """Yield the time of the heat map and of all findings."""
    store = open_store(run)
    cube = recent_cube(store)
    yield timed("reading of all steps and parts", lambda: recent_cube(store), lambda got: f"{got.own.size:,} times")
    yield timed("heat map", lambda: heat_map(cube), lambda got: ", ".join(str(each.culprit) for each in got.outliers))
    yield timed(
        "`megascale diagnose RUN --slow`", lambda: findings(open_store(run)), lambda got: "; ".join(map(str, got))
    )


def timed_verdict(topology: Topology) -> Iterator[str]:
    """Yield the time of a verdict about flight records."""
    from lab.hanging_worlds import Fault, HangingWorld, Workload, step_calls
    from megascale.record.rank_state import LAST_EVENTS, RankState

    culprit = min(HUNG_RANK, topology.world_size - 1)
    calls = step_calls(topology, culprit, Workload())
    at = len(calls) + next(index for index, call in enumerate(calls) if call.key == "tp")
    records = HangingWorld(topology, Fault("hang", culprit, at)).records(LAST_EVENTS)
    texts = {rank: json.dumps(record.to_dict()) for rank, record in records.items()}

    def verdict() -> Any:
        return hang_verdict({rank: RankState.from_dict(json.loads(text)) for rank, text in texts.items()}, {})

    yield timed("verdict about a hang", verdict, lambda got: f"rank {got.ranks}, {got.kind}")
