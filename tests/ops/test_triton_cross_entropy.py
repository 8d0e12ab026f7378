"""The Triton kernels of the cross-entropy, run on a CPU by Triton's interpreter if triton is installed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.config.backends import BackendsConfig
from megascale.core.rank import Rank
from megascale.ops import cross_entropy as reference
from megascale.ops.cross_entropy import CrossEntropy, Targets, TritonCrossEntropy, no_reduce
from megascale.ops.select import build_op
from tests.model.test_vocabulary import axis_of
from tests.ops.interpreter import compile_for_hopper, interpreted
from tests.ops.settings import setting
from tests.worlds import run_world

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")

MODULE = "megascale.ops.triton_cross_entropy"
SIZES = [(5, 4096), (3, 9001), (2, 100)]  # rows and columns: a block, two and a part, and less than one


@pytest.fixture
def kernels() -> Iterator[Any]:
    with interpreted(MODULE) as module:
        yield module


def logits(rows: int, n: int, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    drawn = torch.randn(rows, n, generator=torch.Generator().manual_seed(n)) * spread
    drawn[:, -7:] = -math.inf  # padding
    drawn[0] = drawn[0].sort().values  # every block has a higher maximum
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_statistics(kernels: Any, dtype: torch.dtype) -> None:
    """Maximum and label's logit bit for bit; the sum to the rounding of its order and of the rescaling."""
    for size in SIZES:
        x, columns = logits(*size, dtype), torch.arange(size[0]) * 7
        peak, total, at_label = kernels.statistics(x, columns, torch.float32, None)
        wide = x.double()
        assert torch.equal(peak, x.amax(-1).float()) and torch.equal(at_label, x[range(size[0]), columns].float())
        torch.testing.assert_close(total.double(), (wide - peak[:, None]).exp().sum(-1), rtol=2e-6, atol=0)
        theirs = reference.statistics(x.clone(), columns, torch.float32, None)
        assert torch.equal(peak, theirs[0]) and torch.equal(at_label, theirs[2])
        torch.testing.assert_close(total, theirs[1], rtol=2e-6, atol=0)


def test_a_shard_of_padding_adds_nothing(kernels: Any) -> None:
    x, columns = torch.full((2, 5000), -math.inf, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    peak, total, at_label = kernels.statistics(x, columns, torch.float32, None)
    assert torch.equal(peak, torch.full((2,), torch.finfo(torch.float32).min)) and not total.any()
    assert at_label.eq(-math.inf).all()
    kernels.gradient(x, columns, peak, torch.ones(2), torch.zeros(2), None)
    assert not x.any()


def test_a_nan_reaches_the_loss(kernels: Any) -> None:
    x = logits(2, 9001, torch.float32)
    x[1, 8200] = math.nan
    _, total, _ = kernels.statistics(x, torch.zeros(2, dtype=torch.int64), torch.float32, None)
    assert total.isnan().tolist() == [False, True]


def operation_of(dtype: torch.dtype, z_loss: float) -> CrossEntropy:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonCrossEntropy, "unsupported_reason", lambda self, context: None)
        return build_op(
            "cross_entropy",
            replace(setting(dtype), z_loss=z_loss, backends=BackendsConfig(cross_entropy="triton")),
        )


ROUNDING = {torch.float32: 5e-6, torch.bfloat16: 2.0**-7}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_loss_and_gradient_equal_the_reference(kernels: Any, dtype: torch.dtype) -> None:
    """Of labels here, on another rank, and masked."""
    for (rows, n), z_loss in itertools.product(SIZES, (0.0, 1e-2)):
        columns, weights = torch.arange(rows) * 7 - 7, torch.arange(rows).float() + 0.5
        weights[-1] = 0.0
        targets, mine = Targets(columns, weights, n - 7), logits(rows, n, dtype)
        theirs = CrossEntropy(reference.statistics, reference.gradient, z_loss=z_loss)
        expected, expected_grad = theirs(mine.clone(), targets, no_reduce, True)
        _, wide = operation_of(torch.float32, z_loss)(mine.to(torch.float32, copy=True), targets, no_reduce, True)
        loss, grad = operation_of(dtype, z_loss)(mine, targets, no_reduce, True)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        assert grad is not None and grad.data_ptr() == mine.data_ptr() and expected_grad is not None
        torch.testing.assert_close(grad, expected_grad, rtol=ROUNDING[dtype], atol=1e-8)
        assert wide is not None and torch.equal(grad, wide.to(dtype)), "rounds once, to nearest"
        assert not grad[:, n - 7 :].any()


def shard_of_loss(rank: Rank) -> tuple[float, Any]:
    """Return the loss, and this rank's columns of the gradient, of logits of which it has half."""
    axis = axis_of(rank, 2)
    x, columns = logits(3, 9000, torch.bfloat16)[:, axis.index * 4500 :][:, :4500].contiguous(), torch.arange(3) * 4000
    targets = Targets(columns - axis.index * 4500, torch.ones(3), 4500 - 7 * axis.index)
    with interpreted(MODULE):
        loss, grad = operation_of(torch.bfloat16, 0.0)(x, targets, partial(all_reduce, axis.group), True)
    assert grad is not None
    return loss.item(), grad.float().numpy()


def test_ranks_share_a_vocabulary() -> None:
    (loss, left), (other, right) = run_world(2, shard_of_loss)
    targets = Targets(torch.arange(3) * 4000, torch.ones(3), 9000 - 7)
    expected, grad = reference.cross_entropy(logits(3, 9000, torch.bfloat16), targets, no_reduce, True)
    assert loss == other == pytest.approx(expected.item(), rel=1e-6) and grad is not None
    torch.testing.assert_close(
        torch.from_numpy(np.concatenate([left, right], 1)), grad.float(), rtol=2.0**-7, atol=1e-8
    )


@pytest.mark.parametrize("kernel", ["_statistics", "_gradient"])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_it_compiles_for_hopper(kernel: str, dtype: str) -> None:
    """Casts round to nearest."""
    types = dict.fromkeys(("peak", "total", "at_label", "scale", "minus"), "*fp32")
    types |= {"logits": dtype, "columns": "*i64"}
    ptx = compile_for_hopper(MODULE, kernel, types, {"n": 128_256, "BLOCK": 4096})
    assert ("cvt.rn.bf16" in ptx) == (kernel == "_gradient" and dtype == "*bf16")
