"""Casts by the kernel that writes a tensor: when they hold, and that steps with them are those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.recipes import TENSOR
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.ops import activation, fp8
from megascale.ops.planned_cast import PlannedCast, keep_cast, kept_cast, planned_casts
from megascale.ops.recipe import Quantizer
from tests.marks import only_quick
from tests.runs import LLAMA, config_of, settings, train_curve
from tests.worlds import run_world


def test_a_cast_holds_for_a_tensor_until_it_is_changed() -> None:
    x = torch.ones(2, 4)
    cast = fp8.cast(x, None, TENSOR, fp8.ElementFormat.E4M3, False, None)
    assert kept_cast(x) is None and planned_casts(x) == (None, None)
    keep_cast(x, cast)
    assert kept_cast(x) is cast and kept_cast(x.view(-1)) is None
    x[0, 0] = 7
    assert kept_cast(x) is None


class CastingSwiGLU(torch.autograd.Function):
    """What Triton's kernels do, in torch's operators."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, plan: PlannedCast | None, of_gradient: PlannedCast | None) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.plan = of_gradient
        return as_planned(activation.swiglu(gate_up), plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with torch.enable_grad():
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            (grad,) = torch.autograd.grad(activation.swiglu(leaf), leaf, grads[0])
        return as_planned(grad, ctx.plan), None, None


def as_planned(x: Tensor, plan: PlannedCast | None) -> Tensor:
    if plan is not None:
        keep_cast(x, fp8.cast(x, plan.expected, TENSOR, plan.element, False, plan.record))
    return x


def curve(rank: Rank, config: RunConfig, casts: bool) -> tuple[list[tuple[float, float]], int]:
    """Train with a SwiGLU that casts, or with a plain one. Returns losses and norms, and the linear layers' casts."""
    count, encode = [0], Quantizer.encode

    def counted(*given: Any, **more: Any) -> Any:
        count[0] += 1
        return encode(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quantizer, "encode", counted)
        if casts:
            casting = lambda x: CastingSwiGLU.apply(x, *planned_casts(x))  # noqa: E731
            patch.setattr(activation.TorchActivation, "build", lambda backend, context: casting)
        return train_curve(rank, config, 3), count[0]


@pytest.mark.parametrize("parallel", [{}, {"parallel__tp": 2, "parallel__sp": True}], ids=str)
@pytest.mark.parametrize("recipe", only_quick(["delayed", "static", "tensorwise"], "delayed"))
def test_steps_with_planned_casts_are_those_without(recipe: str, parallel: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit, statistics for the history too: an input and a gradient of two layers need no cast of their own,
    in every step in which the scale is known before.
    """
    given = {"train__precision": "fp8", "fp8__recipe": recipe, "fp8__first_layers_bf16": 0,
             "fp8__last_layers_bf16": 0, "backends__activation": "torch"}  # fmt: skip
    given |= {"optimizer__lr": 1e-3, "batch__global": 2}
    tree = settings(LLAMA | {"num_layers": 2, "ffn_size": 64}, tmp_path, **given, **parallel)
    config = config_of(tree, tmp_path)
    (kept, few), (plain, many) = (run_world(len(parallel) or 1, curve, config, casts)[0] for casts in (True, False))
    assert kept == plain
    steps = {"delayed": 2, "static": 3, "tensorwise": 0}[recipe]
    assert many - few == 2 * 2 * steps * config.num_microbatches


@pytest.mark.slow
def test_a_recomputed_activation_casts_anew(tmp_path: Path) -> None:
    """Full recomputation casts once without a transpose, and once for wgrad."""
    given = {"train__precision": "fp8", "fp8__recipe": "static", "fp8__first_layers_bf16": 0,
             "fp8__last_layers_bf16": 0, "backends__activation": "torch", "train__recompute": "full"}  # fmt: skip
    tree = settings(LLAMA | {"num_layers": 2, "ffn_size": 64}, tmp_path, optimizer__lr=1e-3, **given)
    config = config_of(tree, tmp_path)
    (kept, few), (plain, many) = (run_world(1, curve, config, casts)[0] for casts in (True, False))
    assert kept == plain and many - few == 2 * 3 * 3 * config.num_microbatches
