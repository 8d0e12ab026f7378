"""NVFP4 linear layers, with gradients rounded to nearest: they train, and ranks quantize as one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.core.registry import Card
from megascale.plan.account.traffic import step_traffic
from megascale.plan.dryrun.dry_run import dry_run
from tests.marks import only_quick
from tests.parallel.test_fp8_linear import (
    LAYERS,
    WIDE,
    all_casts,
    casts_of_shared_tokens,
    configured,
    distance,
    first_gradients,
)
from tests.plan.account.test_against_dry_run import sent_by
from tests.runs import build_run, train_curve, train_order
from tests.worlds import run_world

NVFP4 = RECIPES["nvfp4"]
SPECS = {name: replace(NVFP4.facts[name], stochastic=False) for name in ("gradient", "gradient_column")}
NEAREST = Card("nearest", "NVFP4 without stochastic rounding", NVFP4.target, {**NVFP4.facts, **SPECS})


@pytest.fixture
def nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES.cards, "nearest", NEAREST)


def call(rank: Rank, function: Any, *arguments: Any) -> Any:
    """Call a function that knows the recipe."""
    RECIPES.cards["nearest"] = NEAREST
    return function(rank, *arguments)


@pytest.mark.usefixtures("nearest")
def test_a_model_trains(tmp_path: Path) -> None:
    config = configured(tmp_path, "nearest")
    bf16 = configured(tmp_path, "tensorwise", train__precision="bf16")
    (ours,) = run_world(1, call, first_gradients, config)
    (theirs,) = run_world(1, first_gradients, bf16)
    assert max(distance(ours[name], theirs[name]) for name in theirs) < 0.35
    weight = "layers.1.attention.qkv.weight"
    assert distance(ours[weight], theirs[weight]) > 0.05
    losses, expected = (np.array(run_world(1, call, train_curve, each, 4)[0])[:, 0] for each in (config, bf16))
    assert 1e-5 < np.abs(losses - expected).max() < 0.01


def cast_stats(rank: Rank, config: RunConfig) -> dict[str, tuple[float, float, float]]:
    run = build_run(rank, config)
    run.buffers.begin_step()
    run.fp8_state.begin_step(collect_stats=True)
    run.pipeline.run_actions(train_order(run), run.train_loader.batch(0))
    stats = run.fp8_state.take_cast_stats()
    return {name: (each.amax, each.saturated, each.underflow) for name, each in stats.items()}


@pytest.mark.usefixtures("nearest")
def test_statistics_of_casts(tmp_path: Path) -> None:
    """Few elements saturate, the largest of blocks whose scale is rounded down, and more become zero than in FP8."""
    (stats,) = run_world(1, call, cast_stats, configured(tmp_path, "nearest"))
    assert len(stats) == 2 * 4 * 3
    for name, (amax, saturated, underflow) in stats.items():
        assert amax > 0 and 0.001 < saturated < 0.05 and 0.02 < underflow < 0.3, name


@pytest.mark.usefixtures("nearest")
@pytest.mark.parametrize("sequence", [False, True])
def test_two_ranks_quantize_as_one_process(tmp_path: Path, sequence: bool) -> None:
    configs: list[RunConfig] = [configured(tmp_path, "nearest", WIDE)]
    (alone,), ranks = run_world(1, call, all_casts, configs, False), run_world(2, call, all_casts, configs, sequence)
    for layer in LAYERS:
        column = layer == "attention.qkv"
        cuts = [(0 if sequence else None) if column else 2, 0 if column else 1, 1 if column else 0,
                2 if column else (0 if sequence else None)]  # fmt: skip
        for index, cut in enumerate(cuts):
            parts = [rank["nearest", layer][index] for rank in ranks]
            together = parts[0] if cut is None else np.concatenate(parts, cut)
            assert np.array_equal(together, alone["nearest", layer][index])


@pytest.mark.usefixtures("nearest")
def test_ranks_that_share_sequences_quantize_as_one_process(tmp_path: Path) -> None:
    """Operands of wgrad, too, which are rotated along the tokens."""
    configs = [configured(tmp_path, "nearest", WIDE)]
    (alone,) = run_world(1, call, casts_of_shared_tokens, configs)
    first, second = run_world(2, call, casts_of_shared_tokens, configs)
    assert [name for name, whole in alone.items() if not np.array_equal(first[name] + second[name], whole)] == []


@pytest.mark.slow
@pytest.mark.usefixtures("nearest")
@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_two_ranks_are_those_of_one_process(tmp_path: Path, sequence: bool) -> None:
    """As close as bf16 sums permit: an element rounded differently may quantize to the next value."""
    layout = {"parallel__tp": 2, "parallel__sp": sequence}
    (alone,) = run_world(1, call, train_curve, configured(tmp_path, "nearest", WIDE), 3)
    curve = run_world(2, call, train_curve, configured(tmp_path, "nearest", WIDE, **layout), 3)[0]
    for (loss, norm), (expected, expected_norm) in zip(curve, alone, strict=True):
        assert loss == pytest.approx(expected, rel=2e-3)
        assert norm == pytest.approx(expected_norm, rel=5e-2)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"parallel__tp": 2},
    "sp": {"parallel__tp": 2, "parallel__sp": True},
    "cp": {"parallel__cp": 2, "model__seq_length": 256},
    "sharded weights": {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 3},
}


@pytest.mark.usefixtures("nearest")
@pytest.mark.parametrize("layout", only_quick(LAYOUTS))
def test_collectives_are_those_planned(tmp_path: Path, layout: str) -> None:
    """Calls and bytes: of codes, their scales, and amaxes, those of wgrad's operands too."""
    config = configured(tmp_path, "nearest", WIDE, **LAYOUTS[layout])
    dry = dry_run(config, 0)
    assert step_traffic(config, dry.coord) == sent_by(dry)
