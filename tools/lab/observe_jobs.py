"""Slowdowns injected into real jobs of this host, and the findings about their event stores.

A job has four or eight ranks, which share this host's cores. A slowdown begins in step SINCE and ends before UNTIL: the
findings are judged as of its last step, beside what the steps lost, and again GONE_STEPS later.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab.fault_cases import RANKS_PER_NODE
from lab.fault_jobs import run_job
from lab.observe import GONE_STEPS, Judgement, Truth
from lab.outside_faults import job_processes, last_step
from lab.testbed import HostLink, Testbed
from megascale.core.errors import MegascaleError
from megascale.core.process import die_with_parent
from megascale.operate.diagnose.slow.cube_queries import recent_cube, sampled_cube
from megascale.operate.diagnose.slow.finding import Finding
from megascale.operate.diagnose.slow.findings import combine
from megascale.operate.store.query import fetch, open_store

if TYPE_CHECKING:
    import duckdb

SINCE, UNTIL, STEPS = 80, 160, 240
"""First step of a slowdown, the first after it, and steps of a job."""

MEASURED = 40
"""Steps before a slowdown that it is measured against."""

BUSY_LOOPS = 4
"""Other programs beside an undisturbed job."""

DELAY_S, MBIT, CORES = 0.33, 4, 0.2
"""Seconds of a slow norm or batch, Mbit/s of a throttled link, and cores of a throttled host."""

STOPPED_S, RUNS_S = 0.6, 0.4
"""Seconds for which a rank is stopped, and for which it runs, in turn."""

POLL_S = 0.02

Disturbance = Callable[[Path], contextlib.AbstractContextManager[object]]
"""A disturbance of the job of a run, given by its folder, during a `with` block."""


class ObserveJobError(MegascaleError):
    """A job that did not end well."""


@dataclass(frozen=True)
class JobSlowdown:
    """A slowdown of a job of `nodes`: `inject` is `fault.inject`; `ranks`: the culprits, `node`: theirs, for a link or
    a host. `disturbance`: from outside, beside the faults.
    """

    nodes: int
    inject: str = ""
    ranks: tuple[int, ...] = ()
    node: int | None = None
    testbed: bool = False
    disturbance: Disturbance | None = None

    def is_named_by(self, finding: Finding) -> bool:
        """Return True if a finding names the culprit: the rank, or the node or a link of it."""
        if self.node is None:
            return bool(self.ranks) and finding.culprit.ranks == self.ranks
        return f"node{self.node}" in finding.culprit.nodes or finding.culprit.ranks == self.ranks


def _of_rank(phase: str, ranks: Sequence[int]) -> Callable[[random.Random], JobSlowdown]:
    def slowdown(draw: random.Random) -> JobSlowdown:
        rank = draw.choice(ranks)
        fault = f"slow rank={rank} step={SINCE} steps={UNTIL - SINCE} phase={phase} delay_s={DELAY_S}"
        return JobSlowdown(2, fault, (rank,))

    return slowdown


def _of_node(fault: str) -> Callable[[random.Random], JobSlowdown]:
    def slowdown(draw: random.Random) -> JobSlowdown:
        node = draw.randrange(4)
        ranks = tuple(range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE))
        inject = f"{fault.split()[0]} node={node} step={SINCE} steps={UNTIL - SINCE} {fault.split()[1]}"
        return JobSlowdown(4, inject, ranks, node, testbed=True)

    return slowdown


def _stopped(draw: random.Random) -> JobSlowdown:
    rank = draw.randrange(4)
    return JobSlowdown(2, "", (rank,), disturbance=partial(stop_and_go, rank))


@contextlib.contextmanager
def busy_loops(run: Path) -> Iterator[None]:
    """Run BUSY_LOOPS programs that compute, beside the job of a run, for a `with` block."""
    start = partial(die_with_parent, os.getpid())
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command, preexec_fn=start) for _ in range(BUSY_LOOPS)]  # noqa: PLW1509
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


UNDISTURBED = ("undisturbed", f"undisturbed, beside {BUSY_LOOPS} busy loops")

SLOWDOWNS: Mapping[str, Callable[[random.Random], JobSlowdown]] = {
    "rank stopped for 60% of the time": _stopped,
    "slow norm of a rank": _of_rank("optimizer", range(4)),
    "slow data, first stage": _of_rank("data", (0, 1)),
    "slow data, last stage": _of_rank("data", (2, 3)),
    "throttled link": _of_node(f"throttle_link mbit={MBIT}"),
    "throttled host": _of_node(f"throttle_cpu cores={CORES}"),
    UNDISTURBED[0]: lambda draw: JobSlowdown(draw.choice((2, 4))),
    UNDISTURBED[1]: lambda draw: JobSlowdown(draw.choice((2, 4)), disturbance=busy_loops),
}  # fmt: skip
"""Slowdowns of real jobs by kind. Jobs of two nodes have two stages of two replicas, so that every rank has a peer."""


def judge_job(kind: str, number: int, folder: Path) -> Judgement:
    """Run a job with a slowdown, and judge the findings about it. Raises: ObserveJobError"""
    draw = random.Random(f"{kind} {number}")
    slowdown = SLOWDOWNS[kind](draw)
    saves = () if draw.random() < 0.5 else ("checkpoint.in_memory_every=0", "checkpoint.replicate=false")
    name = "-".join(re.findall(r"\w+", f"{kind} {number}"))
    store = open_store(train(folder, name, slowdown, saves))
    healthy = kind in UNDISTURBED
    found = tuple(findings_until(store, STEPS if healthy else UNTIL - 1))
    named = tuple(map(slowdown.is_named_by, found))
    if healthy:
        return Judgement(kind, number, found, named, None)
    later = [one for one in findings_until(store, UNTIL - 1 + GONE_STEPS) if one.until is None]
    gone = not any(map(slowdown.is_named_by, later[:1]))
    after = tuple(one for one in later if one.culprit.ranks and not slowdown.is_named_by(one))
    return Judgement(kind, number, found, named, _truth(store), gone, after)


def findings_until(store: duckdb.DuckDBPyConnection, step: int) -> list[Finding]:
    """Return the findings as they were after a step."""
    cube, sample = (cube.take(cube.steps <= step) for cube in (recent_cube(store), sampled_cube(store)))
    return combine(cube, sample, fetch(store, f"SELECT * FROM events WHERE peer >= 0 AND step <= {step}"))


def _truth(store: duckdb.DuckDBPyConnection) -> Truth:
    cube = recent_cube(store)
    wall, ordinary = cube.wall.mean(0), cube.ordinary_steps
    during, before = ((cube.steps >= first) & (cube.steps < last) & ordinary
                      for first, last in ((SINCE, UNTIL), (SINCE - MEASURED, SINCE)))  # fmt: skip
    step_s = float(np.mean(wall[during]))
    return Truth(step_s - float(np.mean(wall[before])), step_s, SINCE)


def train(folder: Path, name: str, slowdown: JobSlowdown, saves: Sequence[str]) -> Path:
    """Train a job to its end, unless it is there, and return the run's folder. Raises: ObserveJobError"""
    if last_step(folder / name) == STEPS:
        return folder / name
    shutil.rmtree(folder / name, ignore_errors=True)  # of a job that was ended early, which must not go on
    layout = ("parallel.tp=1", f"parallel.dp={slowdown.nodes}") if slowdown.nodes == 2 else ()
    settings = (f"train.steps={STEPS}", "observe.store_interval_s=5", *layout, *saves)
    with contextlib.ExitStack() as stack:
        testbed = stack.enter_context(Testbed(slowdown.nodes, HostLink())) if slowdown.testbed else None
        if slowdown.disturbance is not None:
            stack.enter_context(slowdown.disturbance(folder / name))
        job = run_job(folder, name, slowdown.nodes, *settings, inject=slowdown.inject, testbed=testbed)
    if job.status:
        raise ObserveJobError(f"{name}: the job ended with status {job.status}", hint=f"see {folder / name}.log")
    return folder / name


@contextlib.contextmanager
def stop_and_go(rank: int, run: Path) -> Iterator[None]:
    """Stop the processes of a rank again and again, from step SINCE to UNTIL of a run, for a `with` block at most."""
    ended = threading.Event()

    def stop() -> None:
        while last_step(run) < SINCE - 1:
            if ended.wait(POLL_S):
                return
        mine = job_processes(run, rank=rank)
        while last_step(run) < UNTIL - 1 and not ended.is_set():
            for number, seconds in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, RUNS_S)):
                for pid in mine:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                ended.wait(seconds)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
