"""The Triton kernel of AdamW, run on a CPU by Triton's interpreter if triton is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.ops.optimizer import Segment, TritonOptimizer
from megascale.optim.adamw import AdamW
from megascale.optim.optimizer_shard import OptimizerShard
from megascale.train.step import train_step
from tests.ops.interpreter import compile_for_hopper, interpreted
from tests.optim.test_adamw import CONFIG, by_the_formula, gradient
from tests.runs import LLAMA, config_of, settings
from tests.thread_world import run_threads

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")

MODULE = "megascale.ops.triton_adamw"
SIZE = 2500  # two full blocks and a part
GO, SKIP = torch.zeros(()), torch.ones(())
FACTOR = torch.tensor(0.3, dtype=torch.float64)
NAMES = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def rule() -> Iterator[type[Any]]:
    with interpreted(MODULE) as module:
        yield module.TritonAdamW


def segment(decays: bool = True, seed: int = 1) -> Segment:
    weight = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    state = {name: torch.zeros(SIZE) for name in NAMES}
    return Segment(weight, torch.zeros(SIZE), state, True, decays, rounded=weight.bfloat16())


def tensors(part: Segment) -> Mapping[str, Tensor]:
    assert part.rounded is not None
    return {"weight": part.weight, "rounded": part.rounded, **part.state}


def copied(part: Segment) -> Mapping[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors(part).items()}


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("decays", [True, False])
def test_it_follows_the_formula(rule: type[Any], decays: bool, bias_correction: bool) -> None:
    part, lrs = segment(decays), [1e-2, 2e-2, 5e-3, 1e-3, 1e-3, 0.0]
    decay = CONFIG.weight_decay if decays else 0.0
    expected = by_the_formula(part.weight.clone(), lrs, decay, bias_correction)
    optimizer = rule([part], CONFIG.model_copy(update={"bias_correction": bias_correction}))
    for step, lr in enumerate(lrs, 1):
        grad = gradient(SIZE, step)
        part.grad.copy_(grad / 0.3)
        optimizer.step(lr, step, FACTOR, GO)
        torch.testing.assert_close(part.weight.double(), expected[step - 1], rtol=1e-6, atol=1e-6)
        assert torch.equal(part.grad, grad / 0.3), "the gradient stays"
        assert torch.equal(tensors(part)["rounded"], part.weight.bfloat16())


def test_it_equals_torchs_kernel_but_for_rounding(rule: type[Any]) -> None:
    """Torch divides by the reciprocal of the factor, and computes (1 - beta) x as x - beta x, with beta in fp32."""
    ours, theirs = segment(), segment()
    one, other = rule([ours], CONFIG), AdamW([theirs], CONFIG)
    for step in range(1, 6):
        for part, optimizer in ((ours, one), (theirs, other)):
            part.grad.copy_(gradient(SIZE, step))
            optimizer.step(1e-2, step, FACTOR, GO)
        for name in ("weight", *NAMES):
            torch.testing.assert_close(tensors(ours)[name], tensors(theirs)[name], rtol=2e-6, atol=2e-7)


def test_its_operations_bit_for_bit(rule: type[Any]) -> None:
    """Against numpy, whose square root is rounded to nearest."""
    part, lr, (beta1, beta2) = segment(), 1e-2, CONFIG.betas
    w, m, v = part.weight.clone(), torch.zeros(SIZE), torch.zeros(SIZE)
    optimizer = rule([part], CONFIG)
    for step in range(1, 4):
        part.grad.copy_(gradient(SIZE, step))
        optimizer.step(lr, step, FACTOR, GO)
        g = gradient(SIZE, step) * FACTOR.float()
        values = lr / (1 - beta1**step), lr * CONFIG.weight_decay, (1 - beta2**step) ** 0.5, CONFIG.eps
        size, decay, correction, eps = (torch.tensor(value) for value in values)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        w = w - decay * w - size * m / (torch.from_numpy(np.sqrt(v.numpy())) / correction + eps)
        for name, expected in {"weight": w, "exp_avg": m, "exp_avg_sq": v}.items():
            assert torch.equal(tensors(part)[name], expected), name


def test_a_skipped_step_changes_nothing(rule: type[Any]) -> None:
    part = segment()
    part.grad.fill_(torch.nan)
    before = copied(part)
    rule([part], CONFIG).step(1e-2, 1, torch.tensor(torch.nan, dtype=torch.float64), SKIP)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(part).items())


def test_weights_of_a_run_in_fp32_have_no_second_form(rule: type[Any]) -> None:
    ours, both = replace(segment(), rounded=None), segment()
    for part in (ours, both):
        part.grad.copy_(gradient(SIZE, 1))
        rule([part], CONFIG).step(1e-2, 1, FACTOR, GO)
    assert torch.equal(ours.weight, both.weight)


def curve(run: Any) -> tuple[list[float], Tensor, Tensor]:
    """Train; return the losses, the weights, and the master weights."""
    losses = [train_step(run, run.train_loader.batch(run.progress.samples)).loss for _ in range(3)]
    (shard,) = run.optimizer.shards
    return losses, shard.bucket.weights.clone(), shard.master.clone()


def test_a_model_trains_with_weights_that_the_kernel_rounds(rule: type[Any], tmp_path: Path) -> None:
    def of(backend: str) -> tuple[list[float], Tensor, Tensor]:
        more = {"train__precision": "bf16", "optimizer__lr": 1e-2, "backends": {"optimizer": backend}}
        ((losses, weights, masters),) = run_threads(config_of(settings(LLAMA, tmp_path, **more), tmp_path), curve)
        assert weights.dtype == torch.bfloat16 and masters.dtype == torch.float32
        return losses, weights.float(), masters

    with pytest.MonkeyPatch.context() as patch:
        expected, *_ = of("torch")
        patch.setattr(TritonOptimizer, "unsupported_reason", lambda self, context: None)
        copies = []
        patch.setattr(OptimizerShard, "copy_to_params", copies.append)
        losses, weights, masters = of("triton")
    assert not copies
    assert torch.equal(weights, masters.bfloat16().float())
    assert losses == pytest.approx(expected, rel=2e-3) and losses[2] != losses[0]


@pytest.mark.parametrize("rounded", ["*bf16", "*fp32"])
def test_it_compiles_for_hopper(rounded: str) -> None:
    """The cast rounds to nearest."""
    types = dict.fromkeys(("weight", "grad", *NAMES, "skip"), "*fp32")
    types |= {"rounded": rounded, "grad_factor": "*fp64", "n": "i32"}
    scalars = ("step_size", "decay", "beta1", "rest1", "beta2", "rest2", "correction", "eps")
    types |= dict.fromkeys(scalars, "fp32")
    ptx = compile_for_hopper(MODULE, "_adamw", types, {"BLOCK": 1024})
    assert ("cvt.rn.bf16" in ptx) == (rounded == "*bf16")
