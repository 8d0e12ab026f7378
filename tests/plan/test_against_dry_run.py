"""Formulas say what the training program does, over models and layouts that hypothesis draws: what a rank sends and its
FLOPs exactly, what it holds within 1% for most jobs.
"""

from __future__ import annotations

import statistics

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from megascale.config.run import RunConfig
from megascale.plan.flops import rank_flops
from megascale.plan.memory import rank_bytes
from megascale.plan.traffic import Volume, step_traffic
from tests.marks import only_quick
from tests.plan.jobs import jobs, ranks_of

SLACK = 64 << 10
"""Bytes of what no formula counts: biases, scales, numbers of the loss."""

FARTHEST = 0.01
"""Of no rank is the peak farther from the formula's."""

drawn = settings(
    deadline=None, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def compare(config: RunConfig, ranks: list[int]) -> list[float]:
    """How far the formula's peak is from each rank's, as a share; all else is equal."""
    from megascale.dryrun.run import dry_run

    planned, errors = rank_bytes(config), []
    for rank in ranks:
        dry = dry_run(config, rank)
        sent: dict[tuple[str, str], Volume] = {}
        for call in dry.calls:
            calls, nbytes = sent.get((call.group, call.operation), Volume())
            sent[call.group, call.operation] = Volume(calls + 1, nbytes + call.bytes)
        assert step_traffic(config, dry.coord) == sent
        assert rank_flops(config, dry.coord.pp) == dry.flops.total()
        found, state = planned[dry.coord.pp], dry.state
        assert (found.state.gradients, found.state.optimizer) == (state["gradients"], state["optimizer"])
        if config.train.precision != "fp8":  # whose weights are cast in the step
            assert found.state.weights == state["parameters"]
        off = found.total - dry.peak.total()
        errors.append(0.0 if abs(off) <= SLACK else off / dry.peak.total())
    return errors


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("jobs_drawn", only_quick([30, 500], 30))
def test_what_ranks_do(jobs_drawn: int) -> None:
    """Of few jobs the last rank, which has the head, of many one of each stage."""
    errors: list[tuple[float, str]] = []

    @settings(drawn, max_examples=jobs_drawn)
    @given(jobs())
    def collect(config: RunConfig) -> None:
        ranks = ranks_of(config)
        chosen = ranks if jobs_drawn > 100 else ranks[-1:]
        found = zip(chosen, compare(config, chosen), strict=True)
        errors.extend((abs(error), f"{error:+.1%} on rank {rank} of {config!r}") for rank, error in found)

    collect()
    sizes = [size for size, _ in errors]
    assert statistics.median(sizes) < 0.0002
    farthest, job = max(errors)
    assert farthest < FARTHEST, job


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(
    ("position", "dropout", "total"),
    [("learned", 0.1, 4), ("learned", 0.1, 8), ("learned", 0.0, 8), ("rope", 0.1, 8), ("rope", 0.0, 8)],
)
def test_a_rank_with_the_embedding_alone(precision: str, zero: int, position: str, dropout: float, total: int) -> None:
    """Which does little else than its dropout, and adding positions."""
    tree = {
        "name": "test",
        "model": {
            "num_layers": 4, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 1, "vocab_size": 361,
            "seq_length": 1024, "position": position, "dropout": dropout,
        },
        "parallel": {"dp": 2, "pp": 4, "layers_per_chunk": [0, 2, 2, 0], "zero": zero},
        "batch": {"micro": 2, "global": total},
        "train": {"steps": 10, "precision": precision},
        "optimizer": {"lr": 1e-3},
        "data": {"mock": True},
        "checkpoint": {"every": 0},
    }  # fmt: skip
    assert compare(RunConfig.model_validate(tree).resolve(None), [0]) == [0.0]
