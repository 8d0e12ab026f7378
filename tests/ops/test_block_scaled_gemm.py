"""GEMMs of matrices in blocks of 32 and 16: decoded, and by the double of Blackwell's operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.recipes import ScaleBlock
from megascale.ops import block_scaled_gemm
from megascale.ops.block_scaled_gemm import accumulating, block_scaled_matmul, decoded_matmul, matmul_of, swizzled
from megascale.ops.fp8 import Fp8Kernels
from megascale.ops.quantized import Quantized, pack
from tests import blackwell

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(256, 128, 128), (13, 48, 96), (1, 16, 32), (130, 272, 160)]  # m, n, k


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mx(rows: int, k: int, seed: int = 0, dtype: torch.dtype = E4M3) -> Quantized:
    """A matrix of random codes and scales in blocks of 32."""
    data = torch.randn(rows, k, generator=generator(seed)).mul(100).clamp(-448, 448).to(dtype)
    scale = torch.randint(117, 133, (rows, k // 32), generator=generator(seed), dtype=torch.uint8)
    return Quantized(data, scale.view(torch.float8_e8m0fnu), ScaleBlock(1, 32))


def nv(rows: int, k: int, seed: int = 0, high: int = 1, tensor_scale: float | None = 2.0**-9 * 1.3) -> Quantized:
    """A matrix of random codes and scales in blocks of 16."""
    data = pack(torch.randint(16, (rows, k), generator=generator(seed), dtype=torch.uint8))
    scale = torch.rand(rows // high, k // 16, generator=generator(seed)).mul(448).to(E4M3)
    of_tensor = None if tensor_scale is None else torch.tensor(tensor_scale)
    return Quantized(data, scale, ScaleBlock(high, 16), tensor_scale=of_tensor)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", blackwell.scaled_mm)


MAKERS: list[Callable[..., Quantized]] = [mx, nv, partial(nv, tensor_scale=None)]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gemms_are_those_of_the_numbers(
    make: Callable[..., Quantized], shape: tuple[int, int, int], dtype: torch.dtype, operator: None
) -> None:
    m, n, k = shape
    a, b = make(m, k), make(n, k, seed=1)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    for matmul in (decoded_matmul, block_scaled_matmul):
        found = matmul(a, b, dtype)
        assert found.dtype == dtype and found.shape == (m, n)
        assert (found.double() - exact).norm() <= (1e-6 if dtype == torch.float32 else 2**-8) * exact.norm()


def test_tokens_of_several_samples_and_squares_of_weights(operator: None) -> None:
    x, weight = nv(24, 64), nv(48, 64, seed=1, high=16)
    tokens = replace(x, data=x.data.view(6, 4, 32), scale=x.scale.view(6, 4, 4))
    exact = tokens.dequantize() @ weight.dequantize().t()
    for matmul in (decoded_matmul, block_scaled_matmul):
        torch.testing.assert_close(matmul(tokens, weight, torch.float32), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("matmul", [decoded_matmul, block_scaled_matmul])
def test_weights_gradients_add_up_in_fp32(matmul: Any, operator: None) -> None:
    a, b, total = mx(32, 64), mx(48, 64, seed=1), torch.full((32, 48), torch.nan)
    part = decoded_matmul(a, b, torch.float32)
    wgrad = accumulating(matmul)
    wgrad(total, a, b, False)
    assert (total - part).norm() <= 1e-6 * part.norm()
    wgrad(total, a, b, True)
    assert (total - 2 * part).norm() <= 1e-6 * part.norm()


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (300, 9), (256, 8)])
def test_scales_lie_in_the_order_of_tensor_cores(shape: tuple[int, int]) -> None:
    rows, columns = shape
    scale = torch.arange(rows * columns, dtype=torch.int32).view(shape) + 1
    flat, wide = swizzled(scale), -(-columns // 4) * 4
    assert flat.is_contiguous() and len(flat) == -(-rows // 128) * 128 * wide
    for r in range(rows):
        for c in range(columns):
            place = ((r // 128) * (wide // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            assert flat[place] == scale[r, c]
    assert flat.count_nonzero() == rows * columns


@pytest.mark.parametrize(("capability", "on_tensor_cores"), [
    ((0, 0), False), ((8, 0), False), ((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), False),
])  # fmt: skip
def test_the_capability_chooses(capability: tuple[int, int], on_tensor_cores: bool) -> None:
    expected = block_scaled_matmul if on_tensor_cores else decoded_matmul
    chosen: Any = matmul_of(Fp8Kernels(capability=capability))
    assert getattr(chosen, "func", chosen) is expected


def call(a: Quantized, b: Quantized) -> dict[str, Any]:
    """The arguments of our call."""
    scale_a, kinds, orders = block_scaled_gemm._scales(a)
    return {
        "mat_a": a.data, "mat_b": b.data.t(), "scale_a": scale_a, "scale_recipe_a": kinds,
        "scale_b": block_scaled_gemm._scales(b)[0], "scale_recipe_b": kinds, "swizzle_a": orders, "swizzle_b": orders,
    }  # fmt: skip


MX, NV = call(mx(32, 64), mx(48, 64)), call(nv(32, 64), nv(48, 64))
PLAIN = [F.SwizzleType.NO_SWIZZLE]


def strided(x: Tensor) -> Tensor:
    """An equal matrix, every second row of a larger one."""
    return torch.stack([x.view(torch.uint8), x.view(torch.uint8)], 1).flatten(0, 1)[::2].view(x.dtype)


def shifted(x: Tensor) -> Tensor:
    """An equal matrix at an odd address."""
    flat = torch.cat([torch.zeros(1, dtype=torch.uint8), x.view(torch.uint8).flatten()])[1:]
    return flat.view(x.shape).view(x.dtype)


@pytest.mark.parametrize(
    ("given", "change"),
    [
        (MX, {"capability": (9, 0)}),
        (MX, {"capability": (12, 0)}),
        (NV, {"capability": (9, 0)}),
        (MX, {"mat_a": MX["mat_a"].t().contiguous().t()}),  # column-major
        (MX, {"mat_b": MX["mat_b"].contiguous()}),  # row-major
        (MX, {"mat_a": MX["mat_a"].to(E5M2)}),
        (MX, {"mat_a": MX["mat_a"].to(E5M2), "mat_b": MX["mat_b"].float().to(E5M2)}),
        (MX, {"mat_a": MX["mat_a"].bfloat16()}),
        (MX, call(mx(32, 72), mx(48, 72))),  # k is no multiple of 16
        (MX, call(mx(32, 64), mx(40, 64))),  # n is no multiple of 16
        (MX, {"scale_a": [mx(32, 64).scale]}),  # not padded
        (MX, {"scale_a": [MX["scale_a"][0].float()]}),
        (MX, {"scale_a": [strided(MX["scale_a"][0][:, None]).squeeze(1)]}),
        (MX, {"swizzle_a": PLAIN, "swizzle_b": PLAIN}),
        (MX, {"swizzle_a": None, "swizzle_b": None}),
        (MX, {"scale_recipe_a": NV["scale_recipe_a"][:1], "scale_recipe_b": NV["scale_recipe_b"][:1]}),
        (MX, {"mat_a": shifted(MX["mat_a"])}),
        (MX, {"output_dtype": E4M3}),
        (NV, {"scale_a": NV["scale_a"][:1]}),
        (NV, {"scale_a": NV["scale_a"][:1], "scale_recipe_a": NV["scale_recipe_a"][:1], "swizzle_a": PLAIN}),
        (NV, {"swizzle_a": NV["swizzle_a"][:1], "swizzle_b": NV["swizzle_b"][:1]}),
        (NV, {"scale_a": [NV["scale_a"][0], torch.ones(2)]}),
        (NV, {"use_fast_accum": True}),
        (NV, {"scale_a": [MX["scale_a"][0], NV["scale_a"][1]]}),
    ],
)
def test_the_double_refuses_what_the_operator_refuses(given: dict[str, Any], change: dict[str, Any]) -> None:
    assert blackwell.scaled_mm(**given).isfinite().all()
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)):
        blackwell.scaled_mm(**given | change)
