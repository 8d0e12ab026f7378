"""ZClip by its formula, and skipped steps: the decisions, and their state in checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.comm.mesh import single_process_mesh
from megascale.config.train import OptimizerConfig
from megascale.core.rank import Rank
from megascale.optim.step_guard import StepGuard
from megascale.train.resume import load_initial_state
from megascale.train.step import train_step
from tests.optim.layouts import SMALL, configuration
from tests.runs import build_run, curve_of
from tests.worlds import run_world

TRUE = torch.ones((), dtype=torch.bool)


def guard(**keys: Any) -> StepGuard:
    return StepGuard(OptimizerConfig(lr=1.0, **keys), single_process_mesh(), torch.device("cpu"))


def norms(count: int) -> list[float]:
    """A noisy trace with a spike of 30 and one of 3."""
    noise = torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trace = (1 + 0.05 * noise).tolist()
    trace[60], trace[80] = 30.0, 3.0
    return trace


def zclip_bounds(trace: list[float], alpha: float = 0.97, threshold: float = 2.5, warmup: int = 25) -> list[float]:
    """Kumar et al.'s algorithm, on the host."""
    first, bounds, mean, variance = list[float](), list[float](), 0.0, 0.0
    for norm in trace:
        if len(first) < warmup:
            first.append(norm)
            mean = sum(first) / len(first)
            variance = sum((value - mean) ** 2 for value in first) / len(first)
            bounds.append(math.inf)
            continue
        z = (norm - mean) / (variance**0.5 + 1e-6)
        bound = mean + threshold * variance**0.5 / (z / threshold) if z > threshold else math.inf
        clipped = min(norm, bound)
        mean = alpha * mean + (1 - alpha) * clipped
        variance = alpha * variance + (1 - alpha) * (clipped - mean) ** 2
        bounds.append(bound)
    return bounds


def test_zclip_by_its_formula() -> None:
    trace, ours = norms(120), guard(zclip=True)
    found = [float(ours.bound(torch.tensor(norm, dtype=torch.float64), TRUE)) for norm in trace]
    assert found == pytest.approx(zclip_bounds(trace), rel=1e-7)
    assert found[60] < 1.2 and found[80] < 1.2, "spikes are clipped to little more than the mean"


def test_a_norm_that_is_not_finite_leaves_the_averages_alone() -> None:
    ours = guard(zclip=True)
    for norm in (1.0, 2.0, math.nan, math.inf):
        value = torch.tensor(norm, dtype=torch.float64)
        ours.bound(value, value.isfinite())
    assert ours.zclip.tolist() == [2.0, 3.0, 5.0, 1.5, 0.25]


def skips(losses: list[float], window: int = 8, sigma: float = 6.0) -> list[int]:
    ours, one = guard(skip_sigma=sigma, skip_window=window), torch.ones((), dtype=torch.float64)
    found = [bool(ours.is_spike(value * one, one, (value * one).isfinite())) for value in losses]
    assert float(ours.recent[1, -1]) == sum(found)
    return [index for index, spike in enumerate(found) if spike]


def test_a_spike_is_skipped_after_the_first_window() -> None:
    calm = [3.0 + 0.1 * math.sin(index) for index in range(40)]
    assert skips(calm) == []
    assert skips([*calm[:20], 9.0, *calm[21:]]) == [20]
    assert skips([*calm[:5], 9.0, *calm[6:]]) == [], "no deviation is known yet"
    assert skips([*calm[:20], math.nan, *calm[21:]]) == [], "what is not finite ends the run"


def test_a_lasting_change_ends_the_skips() -> None:
    calm = [3.0 + 0.1 * math.sin(index) for index in range(20)]
    found = skips([*calm, *(value + 4 for value in calm)])
    assert found and found[-1] < 20 + 8


GUARDED = {"name": "adamw", "zclip": True, "zclip_warmup": 2, "skip_sigma": 3.0, "skip_window": 3}


def guarded(rank: Rank, config: Any) -> tuple[list[float], list[bool], bool]:
    """Train with a tenfold gradient in step 5. Return norms, which steps were skipped with unchanged weights, and if a
    run resumed after step 3 is bit-equal.
    """

    def run_of() -> Any:
        run = build_run(rank, config, meshes[0] if meshes else None)
        meshes.append(run.mesh)
        clip = run.optimizer.compute_clipping
        run.optimizer.compute_clipping = lambda sq_norm, tokens, loss: clip(
            sq_norm * (100.0 if run.progress.step == 4 else 1.0), tokens=tokens, loss=loss
        )
        return run

    meshes: list[Any] = []
    run = run_of()
    found, unchanged = [], []
    for _ in range(6):
        before = [shard.master.clone() for shard in run.optimizer.shards]
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        same = all(torch.equal(old, shard.master) for old, shard in zip(before, run.optimizer.shards, strict=True))
        assert same == bool(result.totals["skipped"])
        found.append(result.grad_norm)
        unchanged.append(same)
        if run.progress.step == 3:
            run.checkpoints.save(run.progress)
    again = run_of()
    load_initial_state(again, lambda folder: pytest.fail(str(folder)))
    resumed = [norm for _, norm in curve_of(again, 3)]
    return found, unchanged, resumed == found[3:]


@pytest.mark.parametrize(
    "layout",
    [{"parallel__dp": 2}, pytest.param({"parallel__tp": 2, "parallel__dp": 2}, marks=pytest.mark.slow)],
    ids=["dp2", "tp2 dp2"],
)
def test_a_guarded_run_skips_the_spike_and_resumes_bit_equal(layout: dict[str, Any], tmp_path: Path) -> None:
    config = configuration(tmp_path, GUARDED, SMALL, checkpoint__every=100, **layout)
    ranks = run_world(config.world_size, guarded, config)
    for found, unchanged, same in ranks:
        assert unchanged == [False] * 4 + [True, False]
        assert same and found == ranks[0][0]
