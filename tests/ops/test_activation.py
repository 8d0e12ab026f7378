"""Activation functions against their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megascale.ops.activation import clamped_swiglu, geglu, gelu, gelu_tanh, scaled_tanh, swiglu

BF16 = 2.0**-8
"""Largest relative error of rounding to bf16."""


def gelu_formula(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def gelu_tanh_formula(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def swiglu_formula(gate_up: Tensor) -> Tensor:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    return gate / (1 + torch.exp(-gate)) * up


def geglu_formula(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gelu_tanh_formula(gate) * up


def clamped_swiglu_formula(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


ACTIVATIONS = {
    "gelu": (gelu, gelu_formula),
    "gelu_tanh": (gelu_tanh, gelu_tanh_formula),
    "swiglu": (swiglu, swiglu_formula),
    "geglu": (geglu, geglu_formula),
    "clamped_swiglu": (lambda x: clamped_swiglu(4 * x), lambda x: clamped_swiglu_formula(4 * x)),
}
activations = pytest.mark.parametrize(("activation", "formula"), ACTIVATIONS.values(), ids=list(ACTIVATIONS))
Activation = Callable[[Tensor], Tensor]


def numbers(*shape: int) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def with_gradient(activation: Activation, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result, and the gradient of x for a fixed upstream gradient."""
    x = x.detach().requires_grad_()
    out = activation(x)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return out.detach(), torch.autograd.grad(out, x, upstream.to(out.dtype))[0]


@activations
def test_fp64_equals_the_formula(activation: Activation, formula: Activation) -> None:
    x = numbers(5, 3, 16)
    for ours, expected in zip(with_gradient(activation, x), with_gradient(formula, x), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@activations
def test_gradients_pass_gradcheck(activation: Activation, formula: Activation) -> None:
    assert torch.autograd.gradcheck(activation, numbers(2, 3, 8).requires_grad_())


@activations
def test_bf16_equals_the_formula_up_to_rounding(activation: Activation, formula: Activation) -> None:
    """Inputs are exact in bf16; gated activations round f(gate), the result, and intermediates of backward."""
    x = numbers(5, 3, 16).bfloat16()
    for ours, expected in zip(with_gradient(activation, x), with_gradient(formula, x.double()), strict=True):
        assert ours.dtype == torch.bfloat16
        assert float((ours.double() - expected).abs().max()) < 3 * BF16 * float(expected.abs().max())


@pytest.mark.parametrize("name", ["swiglu", "geglu", "clamped_swiglu"])
def test_gated_activations_accept_a_non_contiguous_gradient(name: str) -> None:
    activation, formula = ACTIVATIONS[name]
    x = numbers(3, 4, 16).requires_grad_()
    upstream = numbers(8, 4, 3).permute(2, 1, 0)
    (ours,) = torch.autograd.grad(activation(x), x, upstream)
    (expected,) = torch.autograd.grad(formula(x), x, upstream)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_scaled_tanh_sums_the_gradient_of_its_factor_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(64, 128, generator=generator).bfloat16() for _ in range(2))
    alpha = torch.tensor([0.75], dtype=torch.bfloat16)
    found = [t.clone().requires_grad_() for t in (x, alpha)]
    out = scaled_tanh(*found)
    out.backward(grad)
    exact = [t.double().requires_grad_() for t in (x, alpha)]
    torch.tanh(exact[1] * exact[0]).backward(grad.double())
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) < 2 * BF16
