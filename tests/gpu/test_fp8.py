"""FP8 on a GPU: Triton's casts equal those of torch on a CPU; weights' gradients accumulate in place, and are timed."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megascale.bench.quartiles import intervals
from megascale.catalog.recipes import BLOCK_1D, BLOCK_2D, MX, ROW, TENSOR, QuantizerSpec, ScaleBlock
from megascale.device import detect_device
from megascale.ops import fp8
from megascale.ops.fp8 import CastRecord
from megascale.ops.known_amax import known_amax, known_column_amax
from megascale.ops.quantized import ElementFormat, Quantized
from megascale.ops.recipe import Quantizer, build_recipe
from megascale.ops.select import build_op
from megascale.ops.te_linear import TE_GEMM, te_scaled_wgrad
from tests.gpu.conftest import Figure
from tests.ops.settings import setting

pytestmark = pytest.mark.gpu(1, only=True)

N, K, TOKENS = 1536, 1024, 2048


@pytest.fixture(autouse=True)
def capable() -> None:
    if detect_device().capability < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9 or more")


def numbers(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Draw numbers of many magnitudes, of which some underflow."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=draw) * torch.rand(rows, columns, generator=draw) ** 8).bfloat16()


def record(device: str) -> CastRecord:
    return CastRecord(torch.zeros((), device=device), torch.zeros(5, dtype=torch.float64, device=device))


SCALED = [*((block, "fp32") for block in (TENSOR, ROW, BLOCK_1D, BLOCK_2D)), (ROW, "pow2"), (BLOCK_1D, "pow2")]


@pytest.mark.parametrize("element", [ElementFormat.E4M3, ElementFormat.E5M2])
@pytest.mark.parametrize(("block", "scale"), [*SCALED, (MX, "e8m0")], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_casts_are_bit_equal_to_a_cpus(
    block: ScaleBlock, scale: str, element: ElementFormat, turned: bool, known: bool
) -> None:
    from megascale.ops import cast_transpose

    x = numbers(K, TOKENS).t() if turned else numbers(TOKENS, K)
    expected = fp8.amax(x.contiguous(), block) / 2 if known else None
    here, there = record("cpu"), record("cuda")
    on_gpu = x.cuda() if not turned else x.t().cuda().t()
    on_device = expected if expected is None else expected.cuda()
    theirs = fp8.cast(x.contiguous(), expected, block, element, False, here, scale)
    ours = cast_transpose.cast(on_gpu, on_device, block, element, True, there, scale)
    assert torch.equal(ours.data.cpu().view(torch.uint8), theirs.data.view(torch.uint8))
    assert ours.scale.dtype == theirs.scale.dtype and torch.equal(ours.scale.float().cpu(), theirs.scale.float())
    if ours.transposed is not None:
        assert torch.equal(ours.transposed.cpu().view(torch.uint8), theirs.t().data.view(torch.uint8))
    assert there.amax.cpu() == here.amax and there.sums is not None and here.sums is not None
    assert torch.equal(there.sums[:3].cpu(), here.sums[:3])
    torch.testing.assert_close(there.sums.cpu(), here.sums, rtol=1e-5, atol=0)
    if block == ROW and not turned:
        assert torch.equal(known_column_amax(on_gpu).cpu(), fp8.amax(x.t(), ROW))  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_decoded_numbers_are_those_of_torch(name: str) -> None:
    from megascale.ops import decode_blocks

    x = build_recipe(name).rows["input"].encode(numbers(TOKENS, K).cuda())
    assert torch.equal(decode_blocks.decode(x), x.decode())


def quantized(rows: int, block: ScaleBlock, element: ElementFormat, seed: int) -> Quantized:
    return Quantizer(QuantizerSpec(element.name.lower(), block)).encode(numbers(rows, TOKENS, seed).cuda())


def wgrads() -> dict[str, Any]:
    from megascale.ops.scaled_wgrad import scaled_wgrad

    with_te = {} if TE_GEMM.missing_reason() else {"te": te_scaled_wgrad(scaled_wgrad)}
    return {"triton": scaled_wgrad} | with_te


@pytest.mark.parametrize("block", [TENSOR, ROW, BLOCK_1D], ids=str)
def test_weights_gradients_accumulate_in_place(block: ScaleBlock) -> None:
    """In fp32, and without a matrix beside the gradient."""
    grad = quantized(N, block, ElementFormat.E5M2 if block == TENSOR else ElementFormat.E4M3, 1)
    x = quantized(K, block, ElementFormat.E4M3, 2)
    exact = grad.dequantize().double() @ x.dequantize().double().t()
    for name, wgrad in wgrads().items():
        total = torch.full((N, K), torch.nan, device="cuda")
        wgrad(total, grad, x, False)
        wgrad(total, grad, x, True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        wgrad(total, grad, x, True)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < N * K, name
        error = float((total.double() - 3 * exact).abs().max() / (3 * exact).abs().max())
        assert error < 1e-4, f"{name}: {error:.1e}; with fewer bits than fp32 it is 1e-3"


@pytest.mark.parametrize("block", [TENSOR, ROW, BLOCK_1D], ids=str)
def test_weights_gradients_are_timed_beside_torchs(block: ScaleBlock, figure: Figure) -> None:
    """Of the largest weight of llama3-8b and 8,192 tokens: within the GEMM, and by torch's GEMM and an addition."""
    device, draw = detect_device(), partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    if block == BLOCK_1D and device.capability[0] != 9:
        pytest.skip("torch's GEMM needs a GPU of compute capability 9")
    grad, x = (Quantizer(QuantizerSpec("e4m3", block)).encode(draw(rows, 8192)) for rows in (28672, 4096))
    total = torch.zeros(28672, 4096, device="cuda")
    for name, wgrad in (wgrads() | {"torch": fp8.scaled_wgrad}).items():
        wgrad(total, grad, x, True)  # compiles
        timer = device.timer()
        marks = [timer.mark()]
        for _ in range(20):
            wgrad(total, grad, x, True)
            marks.append(timer.mark())
        device.synchronize()
        figure(name, 1e3 * statistics.median(intervals(timer, marks)), "ms")


@pytest.mark.parametrize(("block", "kernels"), [(TENSOR, 3), (ROW, 2), (BLOCK_1D, 1)], ids=str)
def test_a_cast_is_the_counted_kernels(block: ScaleBlock, kernels: int) -> None:
    from megascale.ops import cast_transpose

    x, noted = numbers(TOKENS, K).cuda(), record("cuda")
    cast_transpose.cast(x, None, block, ElementFormat.E4M3, True, noted)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        cast_transpose.cast(x, None, block, ElementFormat.E4M3, True, noted)
        torch.cuda.synchronize()
    found = [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(found) == kernels, found


@pytest.mark.parametrize("rows", [1, TOKENS])
def test_norms_and_swiglu_find_amaxes_in_their_kernels(rows: int, figure: Figure) -> None:
    """Those of a pass over what they write, in one kernel each, of which SwiGLU's raises a zero that another writes."""
    context = replace(setting(torch.bfloat16, detect_device(), hidden_size=K), recipe="tensorwise")
    norm = context.backends.model_copy(update={"norm": "compile", "add_norm": "compile"})
    context = replace(context, backends=norm)
    add_norm, swiglu = build_op("add_norm", context), build_op("activation", context)
    x, gain = (each.cuda() for each in (numbers(rows, K), numbers(1, K)[0]))
    gate_up, grad = numbers(rows, 2 * K).cuda().requires_grad_(), numbers(rows, K, 1).cuda()

    def results() -> list[Tensor]:
        _, normed = add_norm(x, x, gain, None, 1e-5)
        out = swiglu(gate_up)
        return [normed, out, *torch.autograd.grad(out, gate_up, grad)]

    for each in results():
        assert known_amax(each) == fp8.amax(each, TENSOR)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        results()
        torch.cuda.synchronize()
    found = [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    figure("kernels", len(found))
    assert len(found) == 1 + 2 + 2, found
