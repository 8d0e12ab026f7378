"""Norms against their formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megascale.ops.norm import layer_norm, rms_norm, rms_norm_1p

EPS = 1e-5
BF16 = 2.0**-8
"""Largest relative error of rounding to bf16."""


def rms_norm_formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is None
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rms_norm_1p_formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rms_norm_formula(x, 1 + weight, bias)


def layer_norm_formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    assert bias is not None
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + EPS) * weight + bias


NORMS = {
    "rms_norm": (rms_norm, rms_norm_formula, False),
    "rms_norm_1p": (rms_norm_1p, rms_norm_1p_formula, False),
    "layer_norm": (layer_norm, layer_norm_formula, True),
}
norms = pytest.mark.parametrize(("norm", "formula", "has_bias"), NORMS.values(), ids=list(NORMS))
Norm = Callable[..., Tensor]


def inputs(has_bias: bool, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor | None]:
    """x [5, 3, 24], gain, bias; leaves of autograd."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 24, generator=generator, dtype=torch.float64) * scale + 0.3 * scale
    weight = 1 + 0.3 * torch.randn(24, generator=generator, dtype=torch.float64)
    bias = 0.3 * torch.randn(24, generator=generator, dtype=torch.float64)
    return [t.to(dtype).requires_grad_() for t in (x, weight)] + [bias.to(dtype).requires_grad_() if has_bias else None]


def with_gradients(norm: Norm, given: list[Tensor | None], *eps: float) -> list[Tensor]:
    """Return the result, and the gradients of the inputs for a fixed upstream gradient."""
    out = norm(*given, *eps)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    leaves = [t for t in given if t is not None]
    return [out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


@norms
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_fp64_equals_the_formula(norm: Norm, formula: Norm, has_bias: bool, scale: float) -> None:
    """At scale 1e-3 the variance is below eps, and the place of eps in the formula matters."""
    given = inputs(has_bias, torch.float64, scale)
    for ours, expected in zip(with_gradients(norm, given, EPS), with_gradients(formula, given), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))


@norms
def test_gradients_pass_gradcheck(norm: Norm, formula: Norm, has_bias: bool) -> None:
    x, *rest = inputs(has_bias, torch.float64)
    assert x is not None
    assert torch.autograd.gradcheck(lambda *t: norm(*t, EPS), (x.detach()[:2].requires_grad_(), *rest))


@norms
def test_bf16_is_rounded_once(norm: Norm, formula: Norm, has_bias: bool) -> None:
    """Intermediates, statistics and sums over tokens are wider than bf16."""
    given = inputs(has_bias, torch.bfloat16)
    exact = [t.detach().double().requires_grad_() if t is not None else None for t in given]
    for ours, expected in zip(with_gradients(norm, given, EPS), with_gradients(formula, exact), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), expected, rtol=1.01 * BF16, atol=1e-6 * float(expected.abs().max()))
