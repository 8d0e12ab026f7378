"""wgrad GEMMs with accumulation. GPU calls are checked without a GPU: torch's on the meta device, Transformer Engine's
with a stand-in of the same arguments.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megascale.device import Device
from megascale.ops.select import NotByDefault, select_backend
from megascale.ops.wgrad import AddmmWgrad, TEWgrad, addmm_wgrad, torch_wgrad
from tests.ops.settings import CPU, setting

T, N, K, MICRO_BATCHES = 64, 48, 32, 8
META = Device(torch.device("meta"), "nccl")
"""A device other than a CPU, without computation."""


def operands(seed: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    grad, x = (torch.randn(T, n, generator=draw).to(device, dtype) for n in (N, K))
    return grad, x


def accumulation_error(wgrad: Any, dtype: torch.dtype) -> float:
    """Return the relative error of accumulation over micro-batches; the first must overwrite NaN."""
    total = torch.full((N, K), math.nan, dtype=torch.promote_types(dtype, torch.float32))
    exact = torch.zeros(N, K, dtype=torch.float64)
    for index in range(MICRO_BATCHES):
        grad, x = operands(index, dtype)
        wgrad(total, grad, x, index > 0)
        exact += grad.double().t() @ x.double()
    return float((total.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 2.0**-8)])
def test_torchs_sum_equals_that_in_fp64(dtype: str, tolerance: float) -> None:
    assert accumulation_error(torch_wgrad, getattr(torch, dtype)) < tolerance


class Recorder(TorchDispatchMode):
    """Record calls of operators, except views, with their keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.ops.aten.t.default and function.namespace == "aten":
            self.calls.append((function, kwargs))
        return function(*args, **kwargs)


def test_addmm_wgrad_is_one_call_in_place() -> None:
    grad, x = operands(0, torch.bfloat16, "meta")
    total = torch.empty(N, K, device="meta")
    with Recorder() as recorder:
        addmm_wgrad(total, grad, x, False)
        addmm_wgrad(total, grad, x, True)
    (first, written), (second, added) = recorder.calls
    assert first is torch.ops.aten.mm.dtype_out and second is torch.ops.aten.addmm.dtype_out
    assert written["out"] is total and added["out"] is total


def test_a_gpu_selects_addmm_for_bf16() -> None:
    assert select_backend("wgrad", setting(torch.bfloat16, META)).backend == "addmm"
    assert select_backend("wgrad", setting(torch.bfloat16, CPU)).backend == "torch"
    assert select_backend("wgrad", setting(torch.float32, META)).rejected["addmm"] == "has no float32"


def test_a_torch_without_the_gemm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(self: Tensor, mat1: Tensor, mat2: Tensor, *format: Any, out: Tensor) -> None:
        raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16\nand more")

    monkeypatch.setattr(torch, "addmm", older)
    reason = AddmmWgrad().unsupported_reason(setting(torch.bfloat16, META))
    assert reason and not isinstance(reason, NotByDefault)
    suffix = "cannot add a bf16 GEMM to fp32: self and mat2 must have the same dtype, but got Float and BFloat16"
    assert reason.endswith(suffix)
    choice = select_backend("wgrad", setting(torch.bfloat16, META))
    assert choice.backend == "torch" and "te" in choice.rejected


def general_gemm(
    A: Tensor, B: Tensor, out_dtype: torch.dtype | None = None, quantization_params: None = None, gelu: bool = False,
    gelu_in: None = None, alpha: float = 1.0, beta: None = None, accumulate: bool = False, layout: str = "TN",
    out: Tensor | None = None, bias: None = None, use_split_accumulator: bool = False, grad: bool = False,
) -> tuple[Tensor, None, None, None]:  # fmt: skip
    """Stand in for TE's pytorch/cpp_extensions/gemm.py. cuBLAS is column-major: "NT" means B^T A."""
    assert layout == "NT" and grad and out is not None and out.is_contiguous() and out.dtype == out_dtype
    wgrad = B.float().t() @ A.float()
    out.copy_(out + wgrad if accumulate else wgrad)
    return out, None, None, None


def test_transformer_engine_accumulates_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ModuleType("transformer_engine.pytorch.cpp_extensions")
    engine.general_gemm = general_gemm  # type: ignore[attr-defined]
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    assert accumulation_error(TEWgrad().build(setting(torch.bfloat16, META)), torch.bfloat16) < 1e-6
