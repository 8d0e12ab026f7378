"""The Triton kernels of SwiGLU, run on a CPU by Triton's interpreter: values, gradients and amaxes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megascale.ops import activation, fp8
from megascale.ops.fp8 import CastRecord
from megascale.ops.known_amax import known_amax
from megascale.ops.planned_cast import PlannedCast, kept_cast, plan_casts
from megascale.ops.quantized import ElementFormat
from tests.ops.interpreter import Launches, compile_for_hopper, interpreted

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs")

MODULE = "megascale.ops.triton_swiglu"


@pytest.fixture
def kernels() -> Iterator[Any]:
    importlib.import_module(MODULE)  # what the end puts back is not for the interpreter
    with interpreted("megascale.ops.cast_transpose"), interpreted(MODULE) as module:
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


@pytest.mark.parametrize("element", [ElementFormat.E4M3, ElementFormat.E5M2])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("width", [128, 80])
def test_planned_casts_are_those_of_the_written_tensors(
    kernels: Any, element: ElementFormat, counts: bool, width: int
) -> None:
    """Codes in both layouts, scale, amax and counts equal those of `fp8.cast`; rows are no multiple of a tile, nor need
    columns be.
    """
    draw = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(3, 30, n * width, generator=draw).bfloat16() for n in (2, 1))
    plans, expected = [], [torch.tensor(1.5), torch.tensor(0.0625)]
    for amax in expected:
        noted = CastRecord(torch.tensor(0.25), torch.tensor([1, 2, 3]) if counts else None)
        plans.append(PlannedCast(amax, element, noted))
    x.requires_grad_()
    plan_casts(x, plans[0], plans[1])
    out = kernels.swiglu(x)
    (of_x,) = torch.autograd.grad(out, x, grad)
    for written, plan in zip((out.detach(), of_x), plans, strict=True):
        noted = CastRecord(torch.tensor(0.25), torch.tensor([1, 2, 3]) if counts else None)
        wanted = fp8.cast(written, plan.expected, fp8.TENSOR, element, False, noted)
        found = kept_cast(out if written.shape == out.shape else of_x)
        assert found is not None and torch.equal(found.scale, wanted.scale) and found.shape == wanted.shape
        assert torch.equal(found.codes, wanted.codes) and found.transposed is not None
        assert torch.equal(found.transposed.view(torch.uint8), wanted.t().codes)
        assert plan.record is not None and plan.record.amax == noted.amax > 0.25
        assert not counts or torch.equal(plan.record.counts, noted.counts)  # type: ignore[arg-type]
        assert counts or written.abs().max() > plan.expected, "elements beyond the scale saturate"


def test_a_transpose_is_for_a_backward(kernels: Any) -> None:
    plan, x = PlannedCast(torch.tensor(1.0), ElementFormat.E4M3, None), torch.randn(4, 256)
    plan_casts(x, plan, plan)
    cast = kept_cast(kernels.swiglu(x))
    assert cast is not None and cast.transposed is None


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_the_amax(kernels: Any, value: float) -> None:
    x = torch.ones(4, 64)
    x[2, 3] = value
    amax = known_amax(kernels.swiglu(x))
    assert amax is not None and not amax.isfinite()


def test_the_kernel_is_not_compiled_for_places_of_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for shapes; forward and backward differ."""
    from megascale.ops import triton_swiglu

    launches = Launches(triton_swiglu._swiglu)
    monkeypatch.setattr(triton_swiglu, "_swiglu", launches)
    amaxes, counts = torch.zeros(4), torch.zeros(4, 3, dtype=torch.int64)
    for place in range(4):
        plan = PlannedCast(amaxes[place], ElementFormat.E4M3, CastRecord(amaxes[place], counts[place]))
        plan_casts(x := torch.zeros(16, 96 + 32 * place, requires_grad=True), plan, plan)
        triton_swiglu.swiglu(x).sum().backward()
    assert len(launches.found) == 8 and len(set(launches.found)) == 2


@pytest.mark.parametrize("counts", [False, True])
def test_the_kernel_compiles_for_hopper(counts: bool) -> None:
    """With a cast and without, in vectors of 16 bytes."""
    plain = {"gate_up": "*bf16", "out": "*bf16", "record": "*i32", "m": "i32", "f": "i32"}
    plain |= {"largest": "fp32"}
    for given in (plain, plain | {"grad": "*bf16"}):
        for fp8_type in (None, "fp8e4nv", "fp8e5"):
            code = f"*{fp8_type}"
            more = {"amax": "*fp32", "scale": "*fp32", "data": code, "transposed": code} if fp8_type else {}
            more |= {"counts": "*i64"} if fp8_type and counts else {}
            assembly = compile_for_hopper(MODULE, "_swiglu", given | more, {"SIDE": 64, "FP8": fp8_type}, 8)
            assert "ld.global.v4" in assembly and "st.global.v4" in assembly
            assert "st.global.b8" not in assembly and "acq_rel" not in assembly
