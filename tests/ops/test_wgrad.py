"""The GEMMs that add up weights' gradients. Those that need a GPU are called as their sources say: torch's on a device
without memory, Transformer Engine's and Apex's beside stand-ins with their arguments.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megascale.device import Device
from megascale.ops.apex import ApexWgrad
from megascale.ops.library import error_of_import
from megascale.ops.select import Reluctance, select
from megascale.ops.wgrad import EngineWgrad, WideWgrad, torch_wgrad, wide_wgrad
from tests.ops.settings import CPU, setting

T, N, K, MICRO_BATCHES = 64, 48, 32, 8
META = Device(torch.device("meta"), "nccl")
"""A device that is not a CPU, and computes nothing."""


def factors(seed: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    grad, x = (torch.randn(T, n, generator=draw).to(device, dtype) for n in (N, K))
    return grad, x


def summed(wgrad: Any, dtype: torch.dtype) -> float:
    """The relative error of the sum over micro-batches, the first written over what is no number."""
    total = torch.full((N, K), math.nan, dtype=torch.promote_types(dtype, torch.float32))
    exact = torch.zeros(N, K, dtype=torch.float64)
    for index in range(MICRO_BATCHES):
        grad, x = factors(index, dtype)
        wgrad(total, grad, x, index > 0)
        exact += grad.double().t() @ x.double()
    return float((total.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 2.0**-8)])
def test_torchs_sum_is_that_of_fp64(dtype: str, tolerance: float) -> None:
    assert summed(torch_wgrad, getattr(torch, dtype)) < tolerance


class Calls(TorchDispatchMode):
    """Which operators are called, views aside, and with what `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.ops.aten.t.default and function.namespace == "aten":
            self.found.append((function, kwargs))
        return function(*args, **kwargs)


def test_torchs_gemm_of_a_gpu_is_one_call_in_place() -> None:
    grad, x = factors(0, torch.bfloat16, "meta")
    total = torch.empty(N, K, device="meta")
    with Calls() as calls:
        wide_wgrad(total, grad, x, False)
        wide_wgrad(total, grad, x, True)
    (first, kept), (then, added) = calls.found
    assert first is torch.ops.aten.mm.dtype_out and then is torch.ops.aten.addmm.dtype_out
    assert kept["out"] is total and added["out"] is total


def test_a_gpu_takes_torchs_gemm_for_bf16() -> None:
    assert select("wgrad", setting(torch.bfloat16, META)).backend == "addmm"
    assert select("wgrad", setting(torch.bfloat16, CPU)).backend == "torch"
    assert select("wgrad", setting(torch.float32, META)).refusals["addmm"] == "has no float32"


def test_a_torch_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(self: Tensor, one: Tensor, two: Tensor, *format: Any, out: Tensor) -> None:
        raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16\nand more")

    monkeypatch.setattr(torch, "addmm", older)
    reason = WideWgrad().refusal(setting(torch.bfloat16, META))
    assert reason and reason.endswith("cannot add a bf16 product to fp32: self and mat2 must have the same dtype, "
                                      "but got Float and BFloat16") and not isinstance(reason, Reluctance)  # fmt: skip
    choice = select("wgrad", setting(torch.bfloat16, META))
    assert choice.backend == "torch" and "apex" in choice.refusals


def general_gemm(
    A: Tensor, B: Tensor, out_dtype: torch.dtype | None = None, quantization_params: None = None, gelu: bool = False,
    gelu_in: None = None, alpha: float = 1.0, beta: None = None, accumulate: bool = False, layout: str = "TN",
    out: Tensor | None = None, bias: None = None, use_split_accumulator: bool = False, grad: bool = False,
) -> tuple[Tensor, None, None, None]:  # fmt: skip
    """Transformer Engine's, pytorch/cpp_extensions/gemm.py. Its rows are cuBLAS' columns: "NT" is B transposed, A."""
    assert layout == "NT" and grad and out is not None and out.is_contiguous() and out.dtype == out_dtype
    product = B.float().t() @ A.float()
    out.copy_(out + product if accumulate else product)
    return out, None, None, None


def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """Apex's, csrc/megatron/fused_weight_gradient_dense_cuda.cu, which reads through pointers."""
    assert all(t.is_contiguous() for t in (input, d_output, d_weight)) and d_weight.dtype == torch.float32
    d_weight += d_output.float().t() @ input.float()


@pytest.fixture(params=["", "apex._extensions."], ids=["before", "since 2026"])
def libraries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    engine = ModuleType("transformer_engine.pytorch.cpp_extensions")
    engine.general_gemm = general_gemm  # type: ignore[attr-defined]
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)
    monkeypatch.setitem(sys.modules, f"{request.param}fused_weight_gradient_mlp_cuda", kernels)
    error_of_import.cache_clear()
    yield
    error_of_import.cache_clear()


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("backend", [EngineWgrad, ApexWgrad])
def test_libraries_add_in_fp32(backend: Any) -> None:
    assert summed(backend().build(setting(torch.bfloat16, META)), torch.bfloat16) < 1e-6


@pytest.mark.usefixtures("libraries")
def test_apex_serves_where_it_is() -> None:
    assert ApexWgrad().refusal(setting(torch.bfloat16, META)) is None
    assert ApexWgrad().refusal(setting(torch.bfloat16, CPU)) == "needs an NVIDIA GPU"
