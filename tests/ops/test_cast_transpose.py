"""The Triton kernel that casts and transposes, run on a CPU by Triton's interpreter if triton is installed.

The interpreter truncates casts to FP8 where a GPU rounds, and does not preserve NaN; inputs here are exact in FP8.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.recipes import BLOCK, TENSOR
from megascale.ops import fp8
from megascale.ops.fp8 import Fp8Kernels
from megascale.ops.quantized import Fp8Format, Quantized
from megascale.ops.recipe import Quantizer

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")

PARTS = {"one": (1, 1), "columns": (1, None), "blocks along rows": (BLOCK, None), "squares": (BLOCK, BLOCK)}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Tensor | None, Tensor]]]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is declared
    name = "megascale.ops.cast_transpose"
    sys.modules.pop(name, None)
    yield importlib.import_module(name).cast_transpose
    del sys.modules[name]


@pytest.mark.parametrize("x", ["*bf16", "*fp32"])
@pytest.mark.parametrize("one_factor", [True, False])
@pytest.mark.parametrize("fp8_name", ["fp8e4nv", "fp8e5"])
def test_it_compiles_for_hopper(fp8_name: str, one_factor: bool, x: str) -> None:
    """Triton's compiler needs no GPU, and is stricter than its interpreter."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megascale.ops.cast_transpose import COLUMNS, FORMATS, ROWS, _cast_transpose

    constants = {"rowwise": True, "one_factor": one_factor, "ROWS": ROWS, "COLUMNS": COLUMNS}
    constants["fp8"] = next(dtype for dtype in FORMATS.values() if dtype.name == fp8_name)
    sizes = dict.fromkeys(("m", "k", "high", "wide", "factors"), "i32")
    types = {"x": x, "factor": "*fp32", "data": f"*{fp8_name}", "transposed": f"*{fp8_name}", "fp8_max": "fp32"}
    signature = types | sizes | dict.fromkeys(constants, "constexpr")
    order = {name: signature[name] for name in _cast_transpose.arg_names}
    compiled = compile(ASTSource(_cast_transpose, order, constants), target=GPUTarget("cuda", 90, 32))
    assert {"fp8e4nv": ".e4m3x2", "fp8e5": ".e5m2x2"}[fp8_name] in compiled.asm["ptx"], "casts pairs to this format"


def numbers(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix of zeros and numbers with two significant bits."""
    values = torch.tensor([0.0, 1.0, 1.5, 2.0, -3.0, -1.0, 0.5], dtype=dtype)
    return values[torch.arange(m * k) % 7].view(m, k)


@pytest.mark.parametrize("fp8_format", list(Fp8Format))
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("m", "k"), [(256, 384), (128, 256)])
def test_both_layouts_equal_torchs_cast(kernel: Any, fp8_format: Fp8Format, parts: str, m: int, k: int) -> None:
    high, wide = PARTS[parts]
    shape = (1 if high == 1 else m // high, 1 if wide == 1 else k if wide is None else k // wide)
    factor = 2.0 ** (torch.arange(math.prod(shape)).view(shape) % 3)
    given = numbers(m, k, torch.bfloat16), factor, fp8_format.max_value, fp8_format.dtype
    for rows in (True, False):
        actual, expected = kernel(*given, rows), fp8.cast_transpose(*given, rows)
        assert (actual[0] is None) is (not rows)
        for ours, theirs in zip(actual, expected, strict=True):
            if ours is not None:
                assert ours.shape == theirs.shape and ours.dtype == fp8_format.dtype
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("fp8_format", list(Fp8Format))
def test_fp8_data_is_transposed_unchanged(kernel: Any, fp8_format: Fp8Format) -> None:
    x = numbers(130, 64, torch.float32).to(fp8_format.dtype)
    quantizer = Quantizer(fp8_format, TENSOR, kernels=Fp8Kernels(cast_transpose=kernel))
    transposed = quantizer.transpose(Quantized(x, torch.tensor(3.0), TENSOR))
    assert torch.equal(transposed.data.view(torch.uint8), x.t().contiguous().view(torch.uint8))
    assert transposed.scale == 3


def test_sides_need_not_be_multiples_of_a_tile(kernel: Any) -> None:
    x = numbers(150, 72, torch.float32)
    given = x, torch.ones(1, 1), 448.0, torch.float8_e4m3fn
    rows, transposed = kernel(*given)
    assert torch.equal(rows.float(), x) and torch.equal(transposed.float(), x.t())


def test_large_values_saturate(kernel: Any) -> None:
    rows, transposed = kernel(torch.tensor([[1e4, -1e4, 2.0]]), torch.ones(1, 1), 448.0, torch.float8_e4m3fn)
    assert rows.float().tolist() == transposed.t().float().tolist() == [[448.0, -448.0, 2.0]]
