"""The start of a job: processes, imports, requests to the store, and the opening of groups by many ranks of this host
(`python tools/lab startup`); and what follows for jobs of the paper's sizes (MegaScale, 3.5).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lab.forked import run_forked
from lab.store_rate import STORES, StoreRate, installed_stores, measure_rate
from megascale.comm.control import leave_job
from megascale.comm.init import init_distributed
from megascale.comm.mesh import open_mesh
from megascale.comm.store import count_requests
from megascale.core.network import LOOPBACK, listen
from megascale.core.process import usable_cores
from megascale.core.rank import STORE_VARIABLE, Rank
from megascale.device import detect_device
from megascale.layout.topology import Topology
from megascale.operate.channel.secret import SECRET_VARIABLE, new_secret

SIZES = (2_048, 12_288)
"""Ranks of the jobs of the paper's section 3.5."""

PAPER = {2_048: "1,047 s as torch did, 361 s with Redis, below 5 s in order", 12_288: "below 30 s"}
"""Seconds to initialize Megatron-LM's groups, from the paper; the second is for more than 10,000 GPUs."""

ROUNDS = 3

PROCESSES = {
    "a process of Python": "pass",
    "import numpy": "import numpy",
    "import torch": "import torch",
    "import megascale.train.entry": "import megascale.train.entry",
}
"""Code that a new process runs, by what is timed."""


@dataclass(frozen=True)
class GroupOpening:
    """Opening of all groups by `ranks` ranks at once: seconds until the last is through, the median CPU seconds of a
    rank, and the requests and polls to the store: of rank 0, and most of another rank.
    """

    ranks: int
    rendezvous_s: float
    groups_s: float
    cpu_s: float
    first_requests: int
    requests: int
    polls: int


@dataclass(frozen=True)
class StartUp:
    """All measurements of a machine. `processes_s`: median seconds by name."""

    processes_s: dict[str, float]
    rates: list[StoreRate]
    openings: list[GroupOpening]

    @property
    def store_rate(self) -> float:
        """Requests that our store with the most clients answers in a second of CPU time."""
        return [rate for rate in self.rates if rate.store == next(iter(STORES))][-1].requests_per_cpu_s

    def requests(self, ranks: int) -> int:
        """Requests of a job: those of a rank do not grow with the job, those of rank 0 on a straight line."""
        small, large = self.openings[0], self.openings[-1]
        more = (large.first_requests - small.first_requests) / max(large.ranks - small.ranks, 1)
        return round((ranks - 1) * large.requests + large.first_requests + more * (ranks - large.ranks))

    def store_s(self, ranks: int) -> float:
        """Seconds in which the store, on a core of its own, answers the requests of a job."""
        return self.requests(ranks) / self.store_rate


def measure_startup(
    clients: Sequence[int], ranks: Sequence[int], seconds: float, progress: Callable[[str], None]
) -> StartUp:
    """Measure all parts. `seconds`: of each measurement of a store."""
    processes = {}
    for name, code in PROCESSES.items():
        progress(name)
        processes[name] = statistics.median(_process_s(code) for _ in range(ROUNDS))
    rates = []
    for store in installed_stores():
        for count in clients:
            progress(f"{store}, {count} clients")
            rates.append(measure_rate(store, count, seconds))
    openings = []
    for count in ranks:
        progress(f"groups of {count} ranks")
        openings.append(measure_opening(count))
    return StartUp(processes, rates, openings)


def _process_s(code: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begun


def layout_of(ranks: int) -> Topology:
    """The layout of a measurement: tensor and pipeline parallelism of 2 where the ranks allow, and data parallelism."""
    tp = 2 if ranks % 4 == 0 else 1
    pp = 2 if ranks % 8 == 0 else 1
    return Topology(tp=tp, pp=pp, dp=ranks // tp // pp)


def measure_opening(ranks: int) -> GroupOpening:
    """Open the groups of a job of CPU ranks, forked from this process."""
    secret = new_secret()
    with listen(LOOPBACK) as listener:
        address, descriptor = "{}:{}".format(*listener.getsockname()), listener.fileno()

        def work(number: int) -> list[float]:
            os.environ.update({SECRET_VARIABLE: secret, "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"})
            os.environ[STORE_VARIABLE] = address if number else f"{address}:{descriptor}"
            place, before = Rank(number, ranks, number, "localhost"), time.process_time()
            begun = time.perf_counter()
            init_distributed(place, detect_device(allow_gpu=False))
            joined = time.perf_counter()
            open_mesh(layout_of(ranks), number, tied=True)
            opened, cpu_s = time.perf_counter(), time.process_time() - before
            requests, polls = count_requests()
            leave_job()  # rank 0 keeps the store
            return [begun, joined, opened, cpu_s, requests, polls]

        results = run_forked(ranks, work)
    first = min(result[0] for result in results)
    joined = max(result[1] for result in results)
    return GroupOpening(
        ranks,
        joined - first,
        max(result[2] for result in results) - joined,
        statistics.median(result[3] for result in results),
        int(results[0][4]),
        int(max(result[4] for result in results[1:])),
        int(max(result[5] for result in results[1:])),
    )


def as_json(measured: StartUp) -> dict[str, Any]:
    """Return the measurements, and what follows from them."""
    follows = [{"ranks": n, "requests": measured.requests(n), "store_s": measured.store_s(n)} for n in SIZES]
    return {"cores": usable_cores(), **asdict(measured), "extrapolated": follows}


def table(measured: StartUp) -> str:
    """Format the measurements."""
    lines = [f"measured on {usable_cores()} cores of this host, on CPUs with gloo", "", "| process | s |", "|---|---|"]
    lines += [f"| {name} | {seconds:.2f} |" for name, seconds in measured.processes_s.items()]
    lines += ["", "| store | clients | requests/s | requests per CPU s of the server |", "|---|---|---|---|"]
    lines += [
        f"| {rate.store} | {rate.clients:,} | {rate.requests_per_s:,.0f} | {rate.requests_per_cpu_s:,.0f} |"
        for rate in measured.rates
    ]
    lines += ["", "| ranks | rendezvous s | groups s | CPU s of a rank | requests of rank 0 | of another | its polls |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [
        f"| {o.ranks:,} | {o.rendezvous_s:.2f} | {o.groups_s:.2f} | {o.cpu_s:.2f} | {o.first_requests:,} "
        f"| {o.requests} | {o.polls} |"
        for o in measured.openings
    ]
    lines += [
        "",
        "extrapolated: the store has a core of its own, and answers all requests of a start in turn",
        "",
    ]
    lines += ["| ranks | requests | s | the paper, for all groups |", "|---|---|---|---|"]
    lines += [f"| {n:,} | {measured.requests(n):,} | {measured.store_s(n):.1f} | {PAPER[n]} |" for n in SIZES]
    lines += [
        "",
        "not measured: polls of waiting ranks, NCCL's communicators, a network between hosts, imports from a file "
        "system that many hosts share; the paper's seconds are for all of the opening of groups, on GPUs",
    ]
    return "\n".join(lines)
