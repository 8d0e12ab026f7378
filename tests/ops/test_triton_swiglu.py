"""The Triton kernels of SwiGLU, run on a CPU by Triton's interpreter: values, gradients and amaxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megascale.ops import activation, fp8
from megascale.ops.known_amax import known_amax
from tests.ops.interpreter import compile_for_hopper, interpreted

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")

MODULE = "megascale.ops.triton_swiglu"


@pytest.fixture
def kernels() -> Iterator[Any]:
    with interpreted(MODULE) as module:
        yield module


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)], ids=str)
def test_swiglu_and_its_amaxes_are_those_of_the_formula(kernels: Any, dtype: torch.dtype, rounding: float) -> None:
    """Rows are longer than what a program reads at a time, and no multiple of it."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 2 * 2100, generator=draw).to(dtype).requires_grad_()
    exact, grad = x.detach().double().requires_grad_(), torch.randn(3, 2, 2100, generator=draw).to(dtype)
    out, expected = kernels.swiglu(x), activation.swiglu(exact)
    (of_x,), (of_exact,) = torch.autograd.grad(out, x, grad), torch.autograd.grad(expected, exact, grad.double())
    for found, wanted in ((out, expected), (of_x, of_exact)):
        assert found.dtype == dtype
        assert (found - wanted).abs().max() < rounding * wanted.abs().max()
        assert known_amax(found) == fp8.amax(found, fp8.TENSOR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu_is_torchs_bit_for_bit(kernels: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's exponentials. Numpy's, with which the interpreter computes, differ in the last bit, as do torch's
    own at the end of a row that is no multiple of 32.
    """
    for name, function in (("_silu", F.silu), ("_silu_backward", torch.ops.aten.silu_backward)):
        monkeypatch.setattr(kernels, name, computed_by(function))
    draw = torch.Generator().manual_seed(0)
    x, grad = (3 * torch.randn(5, n * 2112, generator=draw).to(dtype) for n in (2, 1))
    results = []
    for swiglu in (kernels.swiglu, activation.swiglu):
        leaf = x.clone().requires_grad_()
        out = swiglu(leaf)
        results.append((out, *torch.autograd.grad(out, leaf, grad)))
    assert all(map(torch.equal, *results))


def computed_by(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a function of the interpreter's tensors."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def call(*given: Any) -> Any:
        out = function(*(torch.from_numpy(each.handle.data) for each in given))
        return tl.core.tensor(TensorHandle(out.numpy(), given[0].handle.dtype), given[0].type)

    return call


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_the_amax(kernels: Any, value: float) -> None:
    x = torch.ones(4, 64)
    x[2, 3] = value
    amax = known_amax(kernels.swiglu(x))
    assert amax is not None and not amax.isfinite()


def test_the_kernels_compile_for_hopper() -> None:
    """In vectors of 16 bytes."""
    types = {"gate_up": "*bf16", "grad": "*bf16", "out": "*bf16", "rows": "*fp32", "f": "i32"}
    for name in ("_swiglu", "_swiglu_backward"):
        given = {key: value for key, value in types.items() if key != "grad" or name == "_swiglu_backward"}
        assembly = compile_for_hopper(MODULE, name, given, {"SPAN": 2048}, 8)
        assert "ld.global.v4" in assembly and "st.global.v4" in assembly, name
