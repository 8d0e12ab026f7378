"""CompAct: gradients from projected inputs are unbiased, layers save rank / inputs of their inputs, and every layout
trains alike.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.comm.group import single_rank_group
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.ops.optimizer import UpdateInput
from megascale.optim.contrib.compact import compact, projection
from megascale.parallel.projected_gemms import ProjectedGemms
from megascale.parallel.tp_overlap import TensorParallel
from megascale.plan.account.memory import JobMemory
from tests.marks import only_quick
from tests.optim.layouts import assembled
from tests.plan.account.test_against_dry_run import sent_by
from tests.runs import GPT, LLAMA, build_run, config_of, curve_of, settings
from tests.thread_world import run_threads
from tests.worlds import run_world

FP64 = torch.empty(0, dtype=torch.float64)
OPTIONS = {"rank": 16, "update_gap": 1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "scale": 0.25}


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wgrad(x: Tensor, grad: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of a weight by the GEMMs of a layer, and what it saves."""
    tp = TensorParallel(single_rank_group("tp"))
    tp.group.recorder.step = step
    gemms = ProjectedGemms(x.shape[1], partial(projection, "layers.3.mlp.up", 64, OPTIONS), tp)
    saved = gemms.saved_input(x, x)
    assert isinstance(saved, Tensor)
    found = gemms.accumulate_wgrad(
        torch.zeros(grad.shape[1], x.shape[1], dtype=torch.float64, requires_grad=True), grad, saved
    )
    assert found is not None
    return found, saved


def test_the_gradient_is_unbiased_over_draws() -> None:
    """A single draw is further from the gradient than it is long; the mean of n draws comes closer by sqrt(n)."""
    x, grad = drawn(40, 64), drawn(40, 24, seed=2)
    exact = grad.t() @ x
    total, errors = torch.zeros_like(exact), {}
    for step in range(1, 801):
        found, saved = wgrad(x, grad, step)
        total += found
        errors[step] = float((total / step - exact).norm() / exact.norm())
    assert saved.shape == (40, 16)
    assert errors[1] > 1 and errors[100] < 0.3 and errors[800] < 0.12
    assert errors[800] < errors[100] / 2


def test_a_projection_is_drawn_by_block_width_and_period() -> None:
    gap = OPTIONS | {"update_gap": 5}
    first = projection("layers.3.attention.qkv", 64, gap, 1, FP64)
    assert torch.equal(first, projection("layers.3.mlp.up.weight", 64, gap, 5, FP64))
    for name, inputs, step in (("layers.4.mlp.up", 64, 1), ("layers.3.mlp.up", 64, 6), ("layers.3.mlp.down", 96, 1)):
        assert not torch.equal(first, projection(name, inputs, gap, step, FP64)[:64])
    wide = projection("layers.0.mlp.up", 400, OPTIONS | {"rank": 300}, 1, FP64)
    assert float(wide.mean()) == pytest.approx(0, abs=1e-3) and float(wide.square().sum(1).mean()) == pytest.approx(
        1, abs=0.01
    )
    assert float((wide * 300**0.5).pow(4).mean()) == pytest.approx(3, abs=0.1)  # normal


def test_the_update_is_adam_of_the_subspace_s_part() -> None:
    """From G = C P^T the rule finds C, and steps within the rows of P^T."""
    basis, low = projection("layers.0.mlp.up.weight", 64, OPTIONS, 1, FP64), drawn(24, 16)
    state = {name: torch.zeros(24, 16, dtype=torch.float64) for name in ("exp_avg", "exp_avg_sq")}
    given = UpdateInput(low @ basis.mT, state, 1, OPTIONS, name="layers.0.mlp.up.weight", dtype=torch.float64)
    direction, kept = compact(given)
    assert torch.allclose(kept["exp_avg"], 0.1 * low, rtol=1e-10)
    assert torch.allclose(direction, 0.25 * low.sign() @ basis.mT, atol=1e-4)


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 zero1": {"parallel__dp": 2},
    "tp2": {"parallel__tp": 2},
    "tp2 sp pp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2},
    "pp2 dp2 zero2 split": {
        "parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2, "parallel__schedule": "zb_h1",
    },
    "dp2 zero3": {"parallel__dp": 2, "parallel__zero": 3},
    "cp2": {"parallel__cp": 2},
}  # fmt: skip


def of(folder: Path, model: dict[str, Any] = LLAMA, precision: str = "fp64", **keys: Any) -> RunConfig:
    optimizer = {"optimizer__name": "compact", "optimizer__options": {"rank": 8, "update_gap": 2}}
    return config_of(settings(model, folder, **{"train__precision": precision, **optimizer, **keys}), folder)


def outcome(run: Any) -> Any:
    curve, found = curve_of(run, 3), run.optimizer.global_tensors()
    return curve, {
        name: [(tensor.shape, shard.offset, shard.data) for shard in tensor.shards] for name, tensor in found.items()
    }


@pytest.mark.parametrize("layout", only_quick(list(LAYOUTS), "tp2 sp pp2"))
@pytest.mark.parametrize("block", only_quick(["serial", "parallel"], "serial"))
def test_every_layout_trains_alike(layout: str, block: str, tmp_path: Path) -> None:
    """The sum of projections over tp is that of the whole input."""
    keys = {"model__block": block, "model__bias": True}
    alone = run_threads(of(tmp_path, **keys), outcome)
    ranks = run_threads(of(tmp_path, **keys, **LAYOUTS[layout]), outcome)
    for (loss, norm), (expected, expected_norm) in zip(ranks[0][0], alone[0][0], strict=True):
        assert loss == pytest.approx(expected, rel=1e-10) and norm == pytest.approx(expected_norm, rel=1e-10)
    whole, found = assembled([alone[0][1]]), assembled([rank[1] for rank in ranks])
    for name, values in whole.items():
        assert float((found[name] - values).norm() / values.norm().clamp(min=1e-30)) < 1e-8, name


def curve_in_a_process(rank: Rank, config: RunConfig) -> Any:
    return curve_of(build_run(rank, config), 3)


def test_a_process_alone_projects_as_ranks_of_tp(tmp_path: Path) -> None:
    """Its group of one rank knows the step, too."""
    (alone,) = run_world(1, curve_in_a_process, of(tmp_path))
    for curve in run_threads(of(tmp_path, parallel__tp=2), lambda run: curve_of(run, 3)):
        assert sum(curve, ()) == pytest.approx(sum(alone, ()), rel=1e-10)


@pytest.mark.parametrize(
    "layout", [pytest.param({}, marks=pytest.mark.slow), {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2}]
)
def test_saved_bytes_are_rank_over_inputs(layout: dict[str, Any], tmp_path: Path) -> None:
    """And traffic is exact, and the peak nearly, by a dry run."""
    from megascale.plan.account.traffic import step_traffic
    from megascale.plan.dryrun.dry_run import dry_run

    model = GPT | {"hidden_size": 256, "seq_length": 512, "vocab_size": 256, "num_layers": 4}
    keys = {"optimizer__options": {"rank": 32}, "train__precision": "bf16", **layout}
    config, whole = (
        of(tmp_path, model, **keys),
        of(tmp_path, model, **keys | {"optimizer__options": {}, "optimizer__name": "adamw"}),
    )
    dry = dry_run(config, 0)
    assert step_traffic(config, dry.coord) == sent_by(dry)
    planned, kept = JobMemory(config).rank(0), JobMemory(whole).rank(0)
    assert -0.03 < planned.total / dry.peak.total() - 1 < 0.16
    tp = config.parallel.tp
    spared = 2 * 512 * (2 * (256 // tp - 32 // tp) + 1024 // tp - 32)  # of qkv and up, and of down, in a block
    assert kept.activations - planned.activations == 4 * spared
