"""Ranks that hang in jobs of real processes are named by their flight records, read from outside."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.comm.collectives import all_reduce
from megascale.comm.open_group import open_group
from megascale.core.rank import Rank
from megascale.operate.diagnose.hang.hang import Verdict, hang_verdict
from megascale.record.layout import Phase
from megascale.record.log import LogIdentity, open_log
from megascale.record.log_reader import read_state
from megascale.record.recorder import Recorder
from tests.jobs import job_config
from tests.recorded_jobs import RecordedJob
from tests.runs import GPT
from tests.worlds import run_world


def hang_outside_of_a_collective(rank: Rank, folder: Path, recorded: bool) -> Verdict | None:
    """Let rank 0 wait for rank 1, which reads both records meanwhile."""
    import torch

    flight = open_log(LogIdentity("test", rank.rank, 2), folder / f"{rank.rank}")
    flight.set_phase(Phase.STEP)
    recorder = Recorder(log=flight, enabled=recorded)
    group = open_group("dp", (0, 1), rank.rank, recorder, slot_bytes=1 << 12)
    tensor = torch.ones(4)
    all_reduce(group, tensor, label="first")
    verdict = None
    if rank.rank == 1:
        deadline = time.monotonic() + 60
        while (wait := read_state(folder / "0").wait) is None or wait.sequence != 1:
            assert time.monotonic() < deadline
        records = {number: read_state(folder / str(number)) for number in range(2)}
        verdict = hang_verdict(records, {0: "S", 1: "S"})
    all_reduce(group, tensor, label="second")
    return verdict


@pytest.mark.parametrize("recorded", [True, False], ids=["event log", "no event log"])
def test_the_rank_in_no_collective_is_named(tmp_path: Path, recorded: bool) -> None:
    verdict = run_world(2, hang_outside_of_a_collective, tmp_path, recorded)[1]
    assert (verdict.kind, verdict.ranks, verdict.group, verdict.confident) == ("collective", (1,), "dp", True)
    assert "rank 0 waits in all_reduce 1 'second' of group dp for rank 1" in verdict.evidence


HEALING = [
    ("stop", ("data", "forward", "backward", "optimizer", "grad_reduce", "totals", "param_gather"), "stopped"),
    ("hang", ("data",), "data"),
    ("hang", ("forward", "backward", "optimizer", "grad_reduce", "totals", "param_gather"), "collective"),
    ("hold_gil", ("forward", "backward", "optimizer"), "locked"),
    ("hold_gil", ("data",), "data"),
    ("slow_storage", ("data",), "data"),
]
HANG_S = 12

EXPERTS = {
    "model__experts": 4, "model__experts_per_token": 2, "model__expert_ffn_size": 24, "model__bias": False,
    "parallel__ep": 2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"parallel__pp": 2}, {"parallel__tp": 2}, {}], ids=["pp2 dp2", "tp2 dp2", "dp4"])
def test_faults_of_random_ranks_are_named(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Each fault ends by itself, so that one job has many."""
    draw = random.Random(str(layout))
    faults = []
    for number in range(8):
        kind, phases, expected = draw.choice(HEALING)
        faults.append((kind, draw.randrange(4), draw.choice(phases), 6 + 3 * number, expected))
    text = "; ".join(f"{kind} rank={rank} step={step} phase={phase} for_s={HANG_S}"
                     for kind, rank, phase, step, _ in faults)  # fmt: skip
    config = job_config(tmp_path, GPT, train__steps=10**6, fault__inject=text, **layout)
    with RecordedJob(config, 4, tmp_path) as job:
        for kind, rank, phase, step, expected in faults:
            records = job.wait_for_hang(after_step=step - 1)
            verdict = hang_verdict(records, job.states())
            named = (verdict.ranks, verdict.kind)
            assert named == ((rank,), expected), (kind, rank, phase, step, verdict)
            job.wait_for(lambda found, step=step: any(r.idle_s < 1 and r.step >= step for r in found.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "kind", "layout"),
    [
        ("skip_collective rank=2 step=5 phase=grad_reduce", 2, "divergence", {}),
        ("skip_collective rank=1 step=5 phase=tp", 1, "divergence", {"parallel__tp": 2}),
        ("skip_collective rank=3 step=5 phase=totals", 3, "divergence", {"parallel__pp": 2}),
        ("lose_message rank=1 step=5", 1, "network", {"parallel__pp": 2}),
        ("hang rank=3 step=5 phase=tp", 3, "collective", {"parallel__tp": 2}),
        ("hang rank=2 step=5 phase=ep", 2, "collective", EXPERTS),
    ],
)
def test_faults_that_last_are_named(tmp_path: Path, fault: str, rank: int, kind: str, layout: dict[str, Any]) -> None:
    config = job_config(tmp_path, GPT, train__steps=10**6, fault__inject=fault, **layout)
    with RecordedJob(config, 4, tmp_path) as job:
        verdict = hang_verdict(job.wait_for_hang(after_step=4), job.states())
    assert rank in verdict.ranks and verdict.kind == kind, verdict
    assert kind == "network" or verdict.confident


@pytest.mark.slow
def test_phases_of_a_stopped_rank(tmp_path: Path) -> None:
    """Stopped before it has joined the job: the others wait for it."""
    with RecordedJob(job_config(tmp_path, GPT), 4, tmp_path) as job:
        job.wait_for(lambda records: True)
        job.ranks[1].send_signal(signal.SIGSTOP)
        records = job.wait_for(lambda found: all(r.phase == Phase.RENDEZVOUS for n, r in found.items() if n != 1))
        assert records[1].phase == Phase.IMPORT
        verdict = hang_verdict(records, {})
        assert (verdict.ranks, verdict.confident) == ((1,), True)
