"""Formulas say what the training program does, over models and layouts that hypothesis draws: what a rank sends, its
FLOPs and its state exactly, what it holds within a margin.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from megascale.account.flops import rank_flops
from megascale.account.memory import rank_memory
from megascale.account.traffic import step_traffic
from megascale.config.run import RunConfig
from tests.drawn import jobs, ranks_of
from tests.marks import only_quick

LOW, HIGH = -0.03, 0.05
"""By how much the formula's total may be off, as a share, for a rank of `LARGE` bytes or more."""

LARGE = 4 << 30

drawn = settings(
    deadline=None, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def compare(config: RunConfig, rank: int) -> tuple[int, float]:
    """Bytes that a rank holds, and how far the formula is off, as a share of them; all else is equal."""
    from megascale.dryrun.run import dry_run

    dry = dry_run(config, rank)
    assert step_traffic(config, dry.coord) == sent_by(dry)
    assert rank_flops(config, dry.coord.pp) == dry.flops.total()
    found, state, held = rank_memory(config, dry.coord.pp), dry.state, dry.peak.total()
    assert (found.gradients, found.optimizer) == (state["gradients"], state["optimizer"])
    if config.train.precision != "fp8":  # whose weights are cast in the step
        assert found.parameters == state["parameters"]
    return held, found.total / held - 1


def sent_by(dry: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes of a dry run by (group, operation)."""
    sent: dict[tuple[str, str], tuple[int, int]] = {}
    for call in dry.calls:
        calls, nbytes = sent.get((call.group, call.operation), (0, 0))
        sent[call.group, call.operation] = calls + 1, nbytes + call.bytes
    return sent


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", only_quick([6, 500], 6))
def test_what_ranks_do(count: int) -> None:
    """Of few jobs the last rank, which has the head, of many one of each stage."""

    @settings(drawn, max_examples=count)
    @given(jobs())
    def check(config: RunConfig) -> None:
        for rank in ranks_of(config)[-1 if count < 100 else 0 :]:
            compare(config, rank)

    check()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", only_quick([14, 300], 14))
def test_what_large_ranks_hold(count: int) -> None:
    """Of each job one rank; docs/memory.md states the mean and the worst of many."""
    errors: list[tuple[float, str]] = []

    @settings(drawn, max_examples=count)
    @given(jobs(large=True, quick=count < 100))
    def collect(config: RunConfig) -> None:
        rank = ranks_of(config)[config.model.num_layers % config.parallel.pp]
        held, error = compare(config, rank)
        if held >= LARGE:
            errors.append((error, f"{error:+.1%} on rank {rank} of {config!r}"))

    collect()
    sizes = [error for error, _ in errors]
    print(f"{len(sizes)} ranks: mean {statistics.mean(map(abs, sizes)):.2%}, {min(sizes):+.2%} to {max(sizes):+.2%}")
    assert len(sizes) >= count // 4
    assert min(errors)[0] >= LOW, min(errors)[1]
    assert max(errors)[0] <= HIGH, max(errors)[1]
