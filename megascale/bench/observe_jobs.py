"""Slowdowns injected into real jobs of this host, and the findings about their event stores.

A job has four ranks: two stages of two replicas. Ranks that share cores with each other and with other programs vary
more than machines of a cluster: what is found in a job without a slowdown says by how much.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megascale.bench.observe import Judgement
from megascale.bench.observe_cases import HEALTHY, KINDS
from megascale.core.errors import MegascaleError
from megascale.eventstore.query import open_store
from megascale.observe.findings import Finding, findings

STEPS = 100
"""Steps of a job."""

LIMIT_S = 600
"""Longest time of a job, in seconds."""

WORLD, READERS = 4, (0, 1)
"""Ranks of a job, and those of the first stage, which read data."""

PAUSE_S, STALL_S, DELAY_S = 0.1, 0.2, 0.05
"""Seconds of a pause, of a stall, and of a late message."""

MODEL = """
[model]
num_layers = 4
hidden_size = 128
num_heads = 4
vocab_size = 1024
seq_length = 64
[parallel]
tp = 1
pp = 2
dp = 2
[batch]
micro = 2
global = 8
[train]
precision = "fp32"
log_every = 20
eval_every = 0
[optimizer]
lr = 1e-3
warmup_steps = 2
[data]
mock = true
[checkpoint]
every = 100000
[observe]
tensorboard = false
store = true
store_interval_s = 5.0
"""
"""The configuration of the jobs, without name, folder and number of steps."""


@dataclass(frozen=True)
class JobSlowdown:
    """A slowdown of a real job: `inject` is `fault.inject`; `rank`: the culprit, None for all."""

    inject: str
    rank: int | None


def _slow(factor: float) -> Callable[[random.Random], JobSlowdown]:
    def slowdown(draw: random.Random) -> JobSlowdown:
        rank = draw.randrange(WORLD)
        return JobSlowdown(f"slow_compute rank={rank} step=20 steps={STEPS} factor={factor}", rank)

    return slowdown


def _link(draw: random.Random) -> JobSlowdown:
    rank = draw.randrange(WORLD)
    return JobSlowdown(f"delay_message rank={rank} step=20 steps={STEPS} delay_s={DELAY_S}", rank)


def _gc(draw: random.Random) -> JobSlowdown:
    pauses = [f"collect_garbage rank={draw.randrange(WORLD)} step={step} delay_s={PAUSE_S}"
              for step in range(20, STEPS) if draw.random() < 0.5]  # fmt: skip
    return JobSlowdown("; ".join(pauses), None)


def _data(draw: random.Random) -> JobSlowdown:
    rank = draw.choice(READERS)
    stalls = [f"slow rank={rank} step={step} phase=data delay_s={STALL_S}"
              for step in range(20, STEPS) if draw.random() < 1 / 3]  # fmt: skip
    return JobSlowdown("; ".join(stalls), rank)


def _job(draw: random.Random) -> JobSlowdown:
    step = draw.randrange(STEPS // 3, STEPS // 2)
    slow = [f"slow_compute rank={rank} step={step} steps={STEPS} factor=1.5" for rank in range(WORLD)]
    return JobSlowdown("; ".join(slow), None)


SLOWDOWNS: Mapping[str, Callable[[random.Random], JobSlowdown]] = {
    "rank 10% slower": _slow(1.1), "rank 50% slower": _slow(1.5), "slow link": _link, "gc storm": _gc,
    "data stalls": _data, "job 50% slower": _job, HEALTHY: lambda draw: JobSlowdown("", None),
}  # fmt: skip
"""Slowdowns of real jobs by kind."""

FINDINGS = {kind: KINDS["job 15% slower" if kind == "job 50% slower" else kind].finding for kind in SLOWDOWNS}
"""Kinds of the right findings."""


class ObserveJobError(MegascaleError):
    """A job that did not end well."""


def judge_job(kind: str, number: int, folder: Path) -> Judgement:
    """Run a job with a slowdown, and judge the findings about it. Raises: ObserveJobError"""
    slowdown = SLOWDOWNS[kind](random.Random(f"{kind} {number}"))
    run = train(folder, f"{kind}-{number}".replace(" ", "-").replace("%", ""), slowdown.inject)
    found = tuple(findings(open_store(run)))
    named = tuple(names_rank(finding, slowdown.rank) for finding in found)
    return Judgement(kind, number, FINDINGS[kind], found, named)


def names_rank(finding: Finding, rank: int | None) -> bool:
    """Return True if a finding names this rank, for a link as one of its ends; all ranks for None."""
    if rank is None:
        return finding.ranks == ()
    return rank in finding.ranks if finding.kind == "link" else finding.ranks == (rank,)


def train(folder: Path, name: str, inject: str) -> Path:
    """Train a job to its end, and return the run's folder. Raises: ObserveJobError"""
    config = folder / "observe.toml"
    config.write_text(MODEL, encoding="utf-8")
    settings = [f"name={name}", f"observe.dir={folder}", f"train.steps={STEPS}", f"fault.inject={inject}"]
    command = [sys.executable, "-m", "megascale", "train", str(config), *settings]
    log = folder / f"{name}.log"
    with open(log, "wb") as output:
        try:
            done = subprocess.run(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ObserveJobError(f"{name}: the job took over {LIMIT_S} s", hint=f"see {log}") from None
    if done.returncode:
        raise ObserveJobError(f"{name}: the job ended with status {done.returncode}", hint=f"see {log}")
    return folder / name
