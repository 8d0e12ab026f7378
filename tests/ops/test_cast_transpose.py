"""The Triton kernel that casts and transposes, in Triton's interpreter, which runs it on a CPU if triton is installed.

The interpreter cuts numbers off where a GPU rounds them to 8 bits, and makes a number of NaN: the numbers here are such
that both are exact.
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

from megascale.ops import fp8
from megascale.ops.fp8 import BLOCK, Grain, Kernels, Number, Quantized

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")

PARTS = {"one": (1, 1), "columns": (1, None), "blocks along rows": (BLOCK, None), "squares": (BLOCK, BLOCK)}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Tensor | None, Tensor]]]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is declared
    name = "megascale.ops.cast_transpose"
    sys.modules.pop(name, None)
    yield importlib.import_module(name).cast_transpose
    del sys.modules[name]


def numbers(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Of two bits each, and zeros."""
    few = torch.tensor([0.0, 1.0, 1.5, 2.0, -3.0, -1.0, 0.5], dtype=dtype)
    return few[torch.arange(m * k) % 7].view(m, k)


@pytest.mark.parametrize("number", list(Number))
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("m", "k"), [(256, 384), (128, 256)])
def test_it_is_torchs_cast_in_both_layouts(kernel: Any, number: Number, parts: str, m: int, k: int) -> None:
    high, wide = PARTS[parts]
    shape = (1 if high == 1 else m // high, 1 if wide == 1 else k if wide is None else k // wide)
    factor = 2.0 ** (torch.arange(math.prod(shape)).view(shape) % 3)
    given = numbers(m, k, torch.bfloat16), factor, number.largest, number.dtype
    for rows in (True, False):
        found, expected = kernel(*given, rows), fp8.cast_transpose(*given, rows)
        assert (found[0] is None) is (not rows)
        for ours, theirs in zip(found, expected, strict=True):
            if ours is not None:
                assert ours.shape == theirs.shape and ours.dtype == number.dtype
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("number", list(Number))
def test_eight_bits_are_transposed_as_they_are(kernel: Any, number: Number) -> None:
    x = numbers(130, 64, torch.float32).to(number.dtype)
    made = Kernels(cast_transpose=kernel).transposed(Quantized(x, torch.tensor(3.0), Grain.TENSOR))
    assert torch.equal(made.data.view(torch.uint8), x.t().contiguous().view(torch.uint8)) and made.scale == 3


def test_sides_need_not_be_whole_tiles(kernel: Any) -> None:
    x = numbers(150, 72, torch.float32)
    given = x, torch.ones(1, 1), 448.0, torch.float8_e4m3fn
    rows, across = kernel(*given)
    assert torch.equal(rows.float(), x) and torch.equal(across.float(), x.t())


def test_what_is_too_large_becomes_the_largest(kernel: Any) -> None:
    rows, across = kernel(torch.tensor([[1e4, -1e4, 2.0]]), torch.ones(1, 1), 448.0, torch.float8_e4m3fn)
    assert rows.float().tolist() == across.t().float().tolist() == [[448.0, -448.0, 2.0]]
