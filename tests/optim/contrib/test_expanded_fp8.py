"""Moments in FP8 with an expanded range: the exponent, the error that it saves, and steps close to those of fp32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megascale.layout.param_groups import ParamGroup
from megascale.ops.optimizer import UpdateInput
from megascale.optim.contrib.eight_bit import adamw_8bit
from megascale.optim.contrib.expanded_fp8 import contracted, expanded
from tests.optim.test_update_rules import adam, dtype_of, gradient, walk


def restored(x: Tensor, signed: bool) -> Tensor:
    return contracted(expanded("x", x, signed), "x")


def error(x: Tensor, back: Tensor) -> float:
    return float((back - x).norm() / x.norm())


def test_the_exponent_fills_the_range() -> None:
    """Magnitudes 1, 1/2, 1/4 and 1/16 become 448, 20.5, 0.935 and 2^-9: k = log(229376) / log(16) = 4.45."""
    x = torch.tensor([1.0, -0.5, 0.25, 0.0625, 0.0])
    state = expanded("x", x, True)
    power = math.log(448 * 2**9) / math.log(16)
    assert state["x_power"].tolist() == pytest.approx([power]) and state["x_scale"].tolist() == [1.0]
    exact = torch.tensor([448 * abs(value) ** power * math.copysign(1, value) for value in x.tolist()])
    assert torch.equal(state["x"].view(torch.float8_e4m3fn).float(), exact.to(torch.float8_e4m3fn).float())
    assert state["x"].tolist() == [0x7E, 0xDA, 0x37, 0x01, 0x00]
    back = contracted(state, "x")
    assert back[[0, 3, 4]].tolist() == pytest.approx([1.0, 0.0625, 0.0])
    assert float(((back - x)[:4] / x[:4]).abs().max()) < 0.02


def test_groups_with_a_wide_range_are_not_compressed() -> None:
    x = torch.tensor([1.0, 1e-9])
    assert float(expanded("x", x, True)["x_power"]) == 1.0
    assert restored(x, True).tolist() == [1.0, 0.0]
    least = float(restored(x, False)[1])
    assert least == pytest.approx(2**-9 / 448), "a second moment of 0 would make a step of any size"


@pytest.mark.parametrize("x", [torch.zeros(5, 5), torch.full((3, 50), -3e-12), torch.full((130,), 1e-30)])
def test_groups_without_a_range(x: Tensor) -> None:
    assert torch.allclose(restored(x, True), x, rtol=1e-6, atol=0)


def test_the_error_that_the_range_saves() -> None:
    """COAT: about 2.25% to 1.45% of first moments, and 2.55% to 0.48% of second ones. Here of moving averages of
    gaussian gradients, with columns and rows of different sizes.
    """
    random = torch.Generator().manual_seed(1)
    size = torch.randn(256, 1, generator=random).exp() * (0.3 * torch.randn(1, 512, generator=random)).exp()
    first, second = torch.zeros(256, 512), torch.zeros(256, 512)
    for _ in range(200):
        grad = torch.randn(256, 512, generator=random) * size
        first, second = 0.9 * first + 0.1 * grad, 0.95 * second + 0.05 * grad**2
    for x, plain, least, most in ((first, 0.0225, 0.012, 0.0155), (second, 0.0225, 0.003, 0.0075)):
        groups = x.view(-1, 128)
        scale = groups.abs().amax(1, keepdim=True) / 448
        cast = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).view_as(x)
        assert error(x, cast) > plain
        assert least < error(x, restored(x, True)) < most


def test_steps_are_close_to_those_in_fp32() -> None:
    """Closer than in the dynamic tree of 8 bits."""
    shape = (24, 40)
    moved = adam(shape, 6, 0.01) - gradient(shape, 0)
    errors = [
        float((walk("adamw_8bit", shape, codes=codes)[0] - adam(shape, 6, 0.01)).norm() / moved.norm())
        for codes in ("e4m3", "dynamic")
    ]
    assert 1e-3 < errors[0] < 0.1 and errors[0] < 2 * errors[1]


def test_small_gradients_beside_large_ones_take_no_long_steps() -> None:
    scale = 10 ** (-6 * torch.rand(16, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    group = ParamGroup("adamw_8bit", 0.0, options={"codes": "e4m3"})
    state = {
        name: torch.zeros(size, dtype=dtype_of(group, name)) for name, size in group.state_shapes((16, 256)).items()
    }
    assert {name: tuple(values.shape) for name, values in state.items() if "power" in name} == {
        "exp_avg_power": (32,), "exp_avg_sq_power": (32,)
    }  # fmt: skip
    for step in range(1, 30):
        grad = scale * gradient((16, 256), step)
        direction, state = adamw_8bit(UpdateInput(grad, state, step, group.all_options))
        assert float(direction.abs().max()) < 3
