"""Formulas equal dry runs of the training program, for models and layouts drawn by hypothesis: a rank's communication,
FLOPs and state exactly, peak memory within a margin.
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
"""Allowed relative error of the formula's total, for a rank of `LARGE` bytes or more."""

LARGE = 4 << 30

drawn = settings(
    deadline=None, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def compare(config: RunConfig, rank: int) -> tuple[int, float]:
    """Compare a rank: peak bytes of the dry run, and the formula's relative error; all else is asserted equal."""
    from megascale.dryrun.dry_run import dry_run

    dry = dry_run(config, rank)
    assert step_traffic(config, dry.coord) == sent_by(dry)
    assert rank_flops(config, dry.coord.pp) == dry.flops.total()
    planned, state, peak = rank_memory(config, dry.coord.pp), dry.state, dry.peak.total()
    assert (planned.gradients, planned.optimizer) == (state["gradients"], state["optimizer"])
    if config.train.precision != "fp8":  # FP8 weights are quantized in the step
        assert planned.parameters == state["parameters"]
    return peak, planned.total / peak - 1


def sent_by(dry: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Sum calls and bytes of a dry run by (group, operation)."""
    sent: dict[tuple[str, str], tuple[int, int]] = {}
    for call in dry.calls:
        calls, nbytes = sent.get((call.group, call.operation), (0, 0))
        sent[call.group, call.operation] = calls + 1, nbytes + call.bytes
    return sent


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", only_quick([4, 500], 4))
def test_communication_flops_and_state_of_ranks(count: int) -> None:
    """With few jobs the last rank is compared, with the head; with many a rank of every stage."""

    @settings(drawn, max_examples=count)
    @given(jobs())
    def check(config: RunConfig) -> None:
        for rank in ranks_of(config)[-1 if count < 100 else 0 :]:
            compare(config, rank)

    check()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", only_quick([3, 300], 3))
def test_memory_of_large_ranks(count: int) -> None:
    """A rank per job is compared; docs/memory.md states the mean and the worst error of many."""
    errors: list[tuple[float, str]] = []

    @settings(drawn, max_examples=count)
    @given(jobs(large=True, quick=count < 100))
    def collect(config: RunConfig) -> None:
        rank = ranks_of(config)[config.model.num_layers % config.parallel.pp]
        peak, error = compare(config, rank)
        if peak >= LARGE:
            errors.append((error, f"{error:+.1%} on rank {rank} of {config!r}"))

    collect()
    sizes = [error for error, _ in errors]
    print(f"{len(sizes)} ranks: mean {statistics.mean(map(abs, sizes)):.2%}, {min(sizes):+.2%} to {max(sizes):+.2%}")
    assert len(sizes) >= count // 4
    assert min(errors)[0] >= LOW, min(errors)[1]
    assert max(errors)[0] <= HIGH, max(errors)[1]
