"""Compensated bf16 weights: small steps are not lost, curves are those of fp32 masters, and state is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.core.rank import Rank
from megascale.optim.compensated import split, whole
from megascale.optim.element_updates import apply_direction
from megascale.plan.account.state_bytes import state_bytes
from megascale.train.resume import load_initial_state
from tests.optim.layouts import SMALL, configuration
from tests.runs import build_run, curve_of
from tests.worlds import run_world

GO = torch.zeros(())


def test_small_steps_are_not_lost() -> None:
    """A thousand steps of -0.01 from 100: bf16 alone stays at 100, whose neighbour is 99.5."""
    weight, low, one = torch.full((1,), 100.0).bfloat16(), torch.zeros(1).bfloat16(), torch.ones(1)
    alone = weight.clone()
    for _ in range(1000):
        apply_direction(weight, low, one, 0.01, 0.0, GO)
        apply_direction(alone, None, one.bfloat16(), 0.01, 0.0, GO)
    assert float(alone) == 100.0
    assert float(whole(weight, low)) == pytest.approx(90.0, abs=0.3)


def test_a_pair_has_16_bits_and_a_skipped_step_changes_none() -> None:
    value = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    high, low = split(value, torch.bfloat16)
    assert torch.equal(high, value.bfloat16()) and low.dtype == torch.bfloat16
    assert float(((whole(high, low) - value) / value).abs().max()) <= 2**-16
    before = high.clone(), low.clone()
    apply_direction(high, low, torch.full_like(value, torch.nan), 0.01, 0.1, torch.ones(()))
    assert torch.equal(high, before[0]) and torch.equal(low, before[1])


def no_weights(folder: Path) -> Any:
    raise AssertionError(f"{folder} is no folder of another project's weights")


def trained(rank: Rank, full: Any, pairs: Any) -> tuple[Any, Any, Any, str, bool]:
    """Return the curves with fp32 masters, with pairs, and of a run that goes on from fp32 masters, with what it says;
    and if a resumed run with pairs continues bit-equal, and one with fp32 masters begins with the sums of pairs.
    """
    run = build_run(rank, full)
    expected = curve_of(run, 4)
    run.checkpoints.save(run.progress)
    expected += curve_of(run, 1)
    changed = build_run(rank, pairs, run.mesh)
    text = load_initial_state(changed, no_weights)
    continued = curve_of(changed, 1)
    ours = build_run(rank, pairs, run.mesh)
    curve = curve_of(ours, 5)
    ours.checkpoints.save(ours.progress)
    again = build_run(rank, pairs, run.mesh)
    load_initial_state(again, no_weights)
    same = all(map(torch.equal, again.optimizer.flat_tensors(), ours.optimizer.flat_tensors()))
    back = build_run(rank, full, run.mesh)
    load_initial_state(back, no_weights)
    for shard, pair in zip(back.optimizer.shards, ours.optimizer.shards, strict=True):
        same = same and bool(pair.residual.any()) and torch.equal(shard.master, pair.master_fp32)
    return expected, curve, continued, text, same and curve_of(again, 2) == curve_of(ours, 2)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("muon", {"parallel__dp": 2}),
        pytest.param("adafactor", {"parallel__tp": 2, "parallel__dp": 2}, marks=pytest.mark.slow),
    ],
)
def test_curves_are_those_of_fp32_masters(name: str, layout: dict[str, Any], tmp_path: Path) -> None:
    """Blocks by a rule of matrices, the rest by AdamW; the weights of both are compensated."""
    keys = {"checkpoint__every": 100, "train__precision": "bf16", **layout}
    full, pairs = (
        configuration(tmp_path, {"name": name, "lr": 0.01, "master_weights": master}, SMALL, **keys)
        for master in ("full", "bf16_compensated")
    )
    for rank, (expected, curve, continued, text, same) in enumerate(run_world(full.world_size, trained, full, pairs)):
        assert same
        assert rank or "begins at zero: low" in text
        for (loss, norm), (other, other_norm) in zip([*curve, *continued], [*expected, expected[-1]], strict=True):
            assert loss == pytest.approx(other, rel=2e-3) and norm == pytest.approx(other_norm, rel=2e-2)
    assert (
        state_bytes(full, 0).optimizer - state_bytes(pairs, 0).optimizer == state_bytes(full, 0).parameters // full.dp
    )
