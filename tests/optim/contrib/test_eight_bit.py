"""Moments in 8 bits: the code's values, its error, and steps close to those of fp32."""

from __future__ import annotations

import pytest
import torch

from megascale.layout.param_groups import ParamGroup
from megascale.ops.optimizer import UpdateInput
from megascale.optim.contrib.eight_bit import adamw_8bit, dequantized, quantized, values_of
from tests.optim.test_update_rules import adam, dtype_of, gradient, walk


def test_values_are_the_dynamic_tree_s() -> None:
    signed, unsigned = values_of(True), values_of(False)
    assert len(signed) == len(unsigned) == 256 and signed[127] == 0 and unsigned[0] == 0
    assert signed[-1] == unsigned[-1] == 1 and torch.equal(signed[:127], -signed[128:255].flip(0))
    assert float(unsigned[1]) == pytest.approx(3.25e-7) and float(signed[128]) == pytest.approx(5.5e-7)
    top = unsigned[-129:-1]  # half of the values are in the upper decade
    assert float(top[0]) > 0.1 and float(unsigned[-130]) < 0.1


@pytest.mark.parametrize("shape", [(16, 48), (7, 9), (300,)])
def test_the_error_of_a_block(shape: tuple[int, ...]) -> None:
    """Less than 1% of the block's largest element for signed values, and zero stays zero."""
    x = gradient(shape, 1)
    x.view(-1)[3] = 0.0
    state = quantized("x", x, True)
    assert state["x"].dtype == torch.uint8 and state["x"].shape == x.shape
    assert state["x_scale"].shape == (-(-x.numel() // 256),)
    back = dequantized(state["x"], state["x_scale"], True)
    assert back.view(-1)[3] == 0
    assert float((back - x).abs().max()) < 0.008 * float(x.abs().max())
    small = dequantized(*quantized("x", 1e-4 * x.abs(), False).values(), False)
    relative = (small / (1e-4 * x.abs()).clamp(min=1e-30) - 1).abs()[x.abs() > 0.1 * x.abs().max()]
    assert float(relative.max()) < 0.05


def test_nothing_is_zero() -> None:
    state = quantized("x", torch.zeros(5, 5), False)
    assert not dequantized(state["x"], state["x_scale"], False).any()


def test_steps_are_close_to_those_in_fp32() -> None:
    """And no closer than 8 bits are."""
    shape = (24, 40)
    moved = adam(shape, 6, 0.01) - gradient(shape, 0)
    error = (walk("adamw_8bit", shape)[0] - adam(shape, 6, 0.01)).norm() / moved.norm()
    assert 1e-3 < float(error) < 0.1
    plain, _ = walk("galore", shape, rank=8)
    error = (walk("galore_8bit", shape, rank=8)[0] - plain).norm() / (plain - gradient(shape, 0)).norm()
    assert 1e-3 < float(error) < 0.1


def test_small_gradients_beside_large_ones_take_no_long_steps() -> None:
    """Elements of a block whose gradients differ by up to 6 decades: the smallest second moments do not become 0."""
    scale = 10 ** (-6 * torch.rand(16, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    group = ParamGroup("adamw_8bit", 0.0)
    state = {
        name: torch.zeros(size, dtype=dtype_of(group, name)) for name, size in group.state_shapes((16, 256)).items()
    }
    for step in range(1, 30):
        grad = scale * gradient((16, 256), step)
        direction, state = adamw_8bit(UpdateInput(grad, state, step, group.all_options))
        assert float(direction.abs().max()) < 3
