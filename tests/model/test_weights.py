"""Weight gradients accumulate in `main_grad` if present, and go to autograd otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale.comm.group import single_rank_group
from megascale.ops.wgrad import torch_wgrad
from megascale.parallel.grad_accumulation import (
    Accumulation,
    accumulate_bias_grad,
    accumulate_embedding_grad,
    accumulate_grad,
    accumulate_wgrad,
)
from megascale.parallel.segments import finish
from megascale.parallel.tensor import column_parallel_linear, row_parallel_steps
from megascale.parallel.tp_overlap import LinearParams, TensorParallel
from megascale.parallel.vocabulary import VocabularyRange, vocab_parallel_embedding

AXIS = TensorParallel(single_rank_group("tp"))
T, N, K = 11, 6, 4
"""(tokens, outputs, inputs)."""


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


INDEX = torch.randint(N, (T,), generator=torch.Generator().manual_seed(9))

ADDITIONS: dict[str, tuple[tuple[int, ...], Callable[..., Tensor | None], Callable[..., Tensor]]] = {
    "add_product": (
        (N, K),
        lambda w, dtype: accumulate_wgrad(w, numbers(T, N, seed=1, dtype=dtype), numbers(T, K, seed=2, dtype=dtype)),
        lambda dtype: torch.einsum(
            "tn,tk->nk", numbers(T, N, seed=1, dtype=dtype).double(), numbers(T, K, seed=2, dtype=dtype).double()
        ),
    ),
    "add_sum": (
        (N,),
        lambda w, dtype: accumulate_bias_grad(w, numbers(T, N, seed=1, dtype=dtype)),
        lambda dtype: numbers(T, N, seed=1, dtype=dtype).double().sum(0),
    ),
    "add_rows": (
        (N, K),
        lambda w, dtype: accumulate_embedding_grad(w, INDEX, numbers(T, K, seed=1, dtype=dtype)),
        lambda dtype: nn.functional.one_hot(INDEX, N).double().T @ numbers(T, K, seed=1, dtype=dtype).double(),
    ),
}
additions = pytest.mark.parametrize(("shape", "add", "formula"), ADDITIONS.values(), ids=list(ADDITIONS))


@additions
@pytest.mark.parametrize(("compute", "accumulate"), [("float64", "float64"), ("bfloat16", "float32")])
def test_accumulates_into_main_grad(shape: Any, add: Any, formula: Any, compute: str, accumulate: str) -> None:
    dtype = getattr(torch, compute)
    weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
    before = numbers(*shape, seed=7).to(getattr(torch, accumulate))
    weight.main_grad = before.clone()  # type: ignore[attr-defined]
    for _ in range(2):
        assert add(weight, dtype) is None, "a gradient is returned to autograd"
    expected = before.double() + 2 * formula(dtype)
    scale = float(expected.abs().max())
    tolerance = 1e-14 if compute == "float64" else 2.0**-8
    assert float((weight.main_grad.double() - expected).abs().max()) < tolerance * scale  # type: ignore[attr-defined]
    assert weight.main_grad.dtype == before.dtype  # type: ignore[attr-defined]


PARTS = ADDITIONS | {
    "add_gradient": (
        (N, K),
        lambda w, dtype: accumulate_grad(w, numbers(N, K, seed=1, dtype=dtype)),
        lambda dtype: numbers(N, K, seed=1, dtype=dtype).double(),
    )
}


@pytest.mark.parametrize(("shape", "add", "formula"), PARTS.values(), ids=list(PARTS))
@pytest.mark.parametrize(("compute", "accumulate"), [("float64", "float64"), ("bfloat16", "float32")])
def test_the_first_contribution_overwrites_main_grad(
    shape: Any, add: Any, formula: Any, compute: str, accumulate: str
) -> None:
    dtype = getattr(torch, compute)
    weight: Any = nn.Parameter(torch.zeros(shape, dtype=dtype))
    weight.main_grad = torch.full(shape, torch.nan, dtype=getattr(torch, accumulate))
    weight.accumulation = Accumulation(torch_wgrad)
    for times in (1, 2, 3):
        add(weight, dtype)
        expected = times * formula(dtype)
        tolerance = 1e-14 if compute == "float64" else 2.0**-7
        assert float((weight.main_grad.double() - expected).abs().max()) < tolerance * float(expected.abs().max())


@additions
@pytest.mark.parametrize("compute", [torch.float64, torch.bfloat16])
def test_without_main_grad_autograd_gets_the_gradient(shape: Any, add: Any, formula: Any, compute: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(shape, dtype=compute))
    results = add(weight, compute)
    assert results.dtype == compute and results.shape == weight.shape
    expected = formula(compute)
    tolerance = 1e-14 if compute == torch.float64 else 2.0**-7
    assert float((results.double() - expected).abs().max()) < tolerance * float(expected.abs().max())


@pytest.mark.parametrize("name", ["add_sum", "add_rows"])
def test_bf16_gradients_are_summed_in_fp32(name: str) -> None:
    """Sum 512 ones: a bf16 sum would stop at 256."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    ones = torch.ones(512, 1, dtype=torch.bfloat16)
    if name == "add_rows":
        weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    weight.main_grad = torch.full(weight.shape, 0.5)  # type: ignore[attr-defined]
    if name == "add_sum":
        accumulate_bias_grad(weight, ones)
    else:
        accumulate_embedding_grad(weight, torch.zeros(512, dtype=torch.int64), ones)
    assert float(weight.main_grad.sum()) == 512.5  # type: ignore[attr-defined]


def row_parallel_linear(x: Tensor, layer: LinearParams, tp: TensorParallel) -> Tensor:
    return finish(row_parallel_steps([x], [layer], tp))


def linear(function: Any) -> Callable[..., Tensor]:
    return lambda weight, bias: function(numbers(5, 2, K, seed=1), LinearParams(weight, bias), AXIS)


def tokens(weight: Tensor, bias: Tensor) -> Tensor:
    ids = torch.randint(N, (5, 2), generator=torch.Generator().manual_seed(3))
    return vocab_parallel_embedding(ids, weight, VocabularyRange(0, N, N), AXIS) + bias.sum()


LAYERS = {"column_linear": linear(column_parallel_linear), "row_linear": linear(row_parallel_linear), "embed": tokens}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))
def test_two_backwards_accumulate_as_in_autograd(layer: Callable[..., Tensor]) -> None:
    """As for a tied weight used by two layers, and for consecutive micro-batches."""
    weight, bias = (nn.Parameter(numbers(*shape, seed=4)) for shape in ((N, K), (N,)))
    for _ in range(2):
        layer(weight, bias).square().sum().backward()
    expected = weight.grad
    weight.grad = None
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    for _ in range(2):
        layer(weight, bias).square().sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, expected, rtol=1e-13, atol=1e-13)  # type: ignore[attr-defined]


@pytest.mark.parametrize("function", [column_parallel_linear, row_parallel_linear])
@pytest.mark.parametrize("has_bias", [True, False])
def test_derivatives_of_linear_layers(function: Any, has_bias: bool) -> None:
    given = [numbers(3, 2, K, seed=1), numbers(N, K, seed=2), numbers(N, seed=3) if has_bias else None]
    leaves = [t.requires_grad_() if t is not None else None for t in given]
    x, weight, bias = leaves
    torch.testing.assert_close(function(x, LinearParams(weight, bias), AXIS), nn.functional.linear(x, weight, bias))
    assert torch.autograd.gradcheck(lambda x, *layer: function(x, LinearParams(*layer), AXIS), leaves)
