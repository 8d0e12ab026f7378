"""Compensated bf16 weights: small steps are not lost, curves are those of fp32 masters, and state is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.comm.totals import sum_over_job
from megascale.core.rank import Rank
from megascale.optim.compensated import KeptUpdates, split, whole
from megascale.optim.element_updates import apply_direction
from megascale.plan.account.state_bytes import state_bytes
from megascale.train.resume import load_initial_state
from tests.optim.layouts import SMALL, configuration
from tests.runs import build_run, curve_of
from tests.thread_world import run_threads
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


def test_what_rounding_keeps_of_updates() -> None:
    """Of a change of 1e-4 pairs keep all; of bf16 weights alone only small ones move: 5.6% is kept."""
    random = torch.Generator().manual_seed(2)
    exact = 0.5 * torch.randn(100_000, generator=random)
    direction = torch.randn(100_000, generator=random).sign()
    shares = []
    for low in (True, False):
        weight, rest = split(exact, torch.bfloat16)
        residual, kept = rest if low else torch.zeros_like(rest), KeptUpdates()
        before, kept.on = whole(weight, residual), True
        apply_direction(weight, residual, direction, 1e-4, 0.0, GO, kept if low else None, len(exact))
        if not low:
            kept.add(-1e-4 * direction, weight.float() - before, GO)
        shares.append(sum(sums[0] / sums[1] for sums in kept._sums))
    assert float(shares[0]) == pytest.approx(1, abs=0.01) and float(shares[1]) == pytest.approx(0.056, abs=0.01)


def test_a_skipped_step_and_elements_of_others_count_nothing() -> None:
    kept, weight, low = KeptUpdates(), torch.ones(8).bfloat16(), torch.zeros(8).bfloat16()
    kept.on = True
    apply_direction(weight, low, torch.full((8,), torch.nan), 0.01, 0.0, torch.ones(()), kept, 8)
    apply_direction(weight, low, torch.ones(8), 0.01, 0.0, GO, kept, -3)
    assert [sums.tolist() for sums in kept._sums] == [[0.0, 0.0]]


def kept_share(run: Any) -> tuple[float, float]:
    """Return the squared length of a step's wanted updates, and the share that is kept."""
    run.optimizer.kept.on = True
    curve_of(run, 1)
    wanted = sum_of(run.mesh, sum(run.optimizer.kept._sums, torch.zeros(2, dtype=torch.float64)))
    return wanted, run.optimizer.kept.take(run.mesh, torch.device("cpu"))


def sum_of(mesh: Any, sums: torch.Tensor) -> float:
    sum_over_job(mesh, sums)
    return float(sums[1])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_share_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    """With norms that tp replicates, and all weights on every rank with zero = 0, elements count once."""
    layouts: list[dict[str, Any]] = [
        {},
        {"parallel__tp": 2},
        {"parallel__dp": 2},
        {"parallel__dp": 2, "parallel__zero": 0},
    ]
    found = [
        run_threads(
            configuration(
                tmp_path, {"name": name, "lr": 0.01, "master_weights": "bf16_compensated"}, SMALL,
                train__precision="bf16", **layout,
            ), kept_share,
        )
        for layout in layouts
    ]  # fmt: skip
    wanted, share = found[0][0]
    assert 0.99 < share <= 1.001
    for ranks in found[1:]:
        assert all(rank == ranks[0] for rank in ranks)
        assert ranks[0][0] == pytest.approx(wanted, rel=0.03) and ranks[0][1] == pytest.approx(share, rel=1e-3)


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
