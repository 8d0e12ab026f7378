"""Formulas say what the training program does, over models and layouts that hypothesis draws: what a rank sends and its
FLOPs exactly, what it holds within 1%.
"""

from __future__ import annotations

import statistics
from typing import Any

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


PARTICULAR = {
    "the input, beside dropout's weights": {
        "model": {
            "num_heads": 4, "num_kv_heads": 2, "ffn_size": 512, "seq_length": 1024, "dropout": 0.1,
            "block": "parallel", "activation": "swiglu", "position": "rope",
        },
        "parallel": {"tp": 2, "pp": 2, "dp": 2},
        "batch": {"micro": 1, "global": 4},
        "train": {"precision": "fp64", "recompute": "selective", "recompute_ops": ["activation"]},
    },
    "products of blocks, one after the other": {
        "model": {
            "hidden_size": 1536, "num_heads": 12, "num_kv_heads": 4, "ffn_size": 2048, "seq_length": 128,
            "block": "parallel",
        },
        "parallel": {"tp": 4, "sp": True, "pp": 2, "dp": 2},
        "batch": {"micro": 3, "global": 12},
        "train": {"precision": "fp8"},
        "fp8": {"recipe": "blockwise"},
    },
    "weights that are cast in the first micro-batch": {
        "model": {
            "num_layers": 5, "hidden_size": 1024, "num_kv_heads": 4, "ffn_size": 1792, "seq_length": 384,
        },
        "parallel": {"tp": 2, "sp": True, "pp": 2, "vpp": 2, "dp": 2},
        "batch": {"micro": 1, "global": 2},
        "train": {
            "precision": "fp8", "recompute": "selective", "recompute_ops": ["attention"], "recompute_chunks": [1],
        },
        "fp8": {"recipe": "rowwise"},
    },
    "two stages, whose receives are posted as they are sent": {
        "model": {
            "num_layers": 6, "num_kv_heads": 2, "ffn_size": 256, "seq_length": 1024, "window": [100, 0],
            "norm": "rmsnorm",
        },
        "parallel": {"pp": 2, "vpp": 2},
        "batch": {"micro": 3, "global": 15},
        "train": {"precision": "fp64"},
    },
    "what is formed again and cast": {
        "model": {
            "num_heads": 2, "ffn_size": 768, "seq_length": 1024, "window": [100, 0], "block": "parallel",
        },
        "parallel": {"tp": 2, "sp": True},
        "batch": {"micro": 2, "global": 6},
        "train": {"precision": "fp8", "recompute": "full"},
        "fp8": {"recipe": "delayed"},
    },
    "a norm's gradient, and its sum": {
        "model": {"hidden_size": 768, "ffn_size": 1024},
        "parallel": {"tp": 4, "pp": 4, "zero": 2},
        "batch": {"micro": 3, "global": 3},
        "train": {"precision": "fp64", "recompute": "selective", "recompute_ops": ["attention", "norm"]},
    },
    "one head on a rank": {
        "model": {
            "hidden_size": 384, "num_heads": 4, "ffn_size": 3584, "seq_length": 128, "dropout": 0.1,
            "block": "parallel", "norm": "rmsnorm", "activation": "swiglu",
        },
        "parallel": {"tp": 4, "pp": 2, "dp": 3, "zero": 2},
        "batch": {"micro": 3, "global": 27},
        "train": {"precision": "fp32"},
    },
    "gradients that nobody is there to sum with": {
        "model": {
            "num_layers": 8, "ffn_size": 2560, "vocab_size": 18222, "seq_length": 384, "block": "parallel",
            "tie_embeddings": True,
        },
        "parallel": {"tp": 4, "pp": 4, "vpp": 2, "zero": 2},
        "batch": {"micro": 2, "global": 2},
        "train": {"precision": "bf16", "recompute": "selective", "recompute_ops": ["norm"]},
        "overlap": {"tp": False, "pp": False, "dp": False},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PARTICULAR)
def test_moments_at_which_most_is_held(name: str) -> None:
    """Each of a job whose peak is there, and was more than 1% off while it was not counted."""
    tree: dict[str, Any] = {
        "name": "test", "optimizer": {"lr": 1e-3}, "data": {"mock": True}, "checkpoint": {"every": 0},
        **PARTICULAR[name],
    }  # fmt: skip
    tree["train"] = {"steps": 10, **tree["train"]}
    tree["model"] = {
        "num_layers": 4, "hidden_size": 256, "num_heads": 8, "vocab_size": 361, "seq_length": 512, **tree["model"],
    }  # fmt: skip
    config = RunConfig.model_validate(tree).resolve(None)
    assert max(map(abs, compare(config, ranks_of(config)))) < 0.004
