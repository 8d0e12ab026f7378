"""Calls of Transformer Engine's GEMMs, checked by a stand-in with the signatures of versions 2.12 to 2.20.

The stand-in checks memory layouts as the C++ code reads them, and computes the formulas. `megascale doctor` tests the
kernels themselves on a GPU.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.recipes import BLOCK, BLOCK_1D, BLOCK_2D, RECIPES, ROW, TENSOR, QuantizerSpec, ScaleBlock
from megascale.device import Device
from megascale.ops import fp8, library
from megascale.ops.fp8 import Fp8Kernels
from megascale.ops.quantized import ElementFormat, Quantized
from megascale.ops.recipe import Quantizer
from megascale.ops.select import OpContext, select_backend, unsupported_reason
from megascale.ops.selftest import TOLERANCES, difference
from megascale.ops.te_linear import TE_GEMM, TEFp8, te_scaled_matmul
from tests.ops.settings import GPU, setting

M, K, N = 256, 640, 384  # five blocks of k: 2D block scales are padded to eight
SERVED = [name for name in RECIPES.names() if RECIPES[name].facts["granularity"] in ("tensor", "block")]
FORMATS = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


# The stand-in for the library.


class Float8TensorStorage:
    """tensor/storage/float8_tensor_storage.py"""

    def __init__(
        self, *, data: Tensor | None, fp8_scale_inv: Tensor, fp8_dtype: str, data_transpose: Tensor | None = None,
        quantizer: Any = None,
    ) -> None:  # fmt: skip
        self._data, self._scale_inv, self._fp8_dtype = data, fp8_scale_inv, fp8_dtype
        self._transpose = data_transpose

    def dequantize(self) -> Tensor:
        assert self._scale_inv.dtype == torch.float32 and self._scale_inv.shape == (1,)
        return read(self._data, self._fp8_dtype) * self._scale_inv


class Float8BlockwiseQTensorStorage:
    """tensor/storage/float8_blockwise_tensor_storage.py; scales as `Float8BlockQuantizer.get_scale_shape` has them."""

    def __init__(
        self, rowwise_data: Tensor | None, rowwise_scale_inv: Tensor | None, columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None, fp8_dtype: str, quantizer: Any, is_2D_scaled: bool,
    ) -> None:  # fmt: skip
        assert columnwise_data is columnwise_scale_inv is quantizer is None
        self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        self._fp8_dtype, self._is_2D_scaled = fp8_dtype, is_2D_scaled

    def dequantize(self) -> Tensor:
        data, scales = read(self._rowwise_data, self._fp8_dtype), self._rowwise_scale_inv
        rows, blocks = data.shape[0], math.ceil(data.shape[1] / 128)
        assert scales is not None and scales.is_contiguous() and scales.dtype == torch.float32
        if self._is_2D_scaled:
            assert scales.shape == (math.ceil(rows / 128), math.ceil(blocks / 4) * 4)
            scales = scales[:, :blocks].repeat_interleave(128, 0)
        else:
            assert scales.shape == (blocks, math.ceil(rows / 4) * 4)
            scales = scales.t()
        return data * scales.repeat_interleave(128, 1)


def read(data: Tensor | None, dtype: str) -> Tensor:
    """Read FP8 bytes as a kernel does through a pointer to a matrix."""
    assert data is not None and data.dim() == 2 and data.is_contiguous() and data.dtype == torch.uint8
    return data.view(FORMATS[dtype]).float()


def general_gemm(
    A: Any, B: Any, out_dtype: torch.dtype | None = None, quantization_params: None = None, gelu: bool = False,
    gelu_in: None = None, alpha: float = 1.0, beta: None = None, accumulate: bool = False, layout: str = "TN",
    out: Tensor | None = None, bias: None = None, use_split_accumulator: bool = False, grad: bool = False,
    ub: None = None, ub_type: None = None, extra_output: None = None, bulk_overlap: bool = False,
) -> tuple[Tensor, None, None, None]:  # fmt: skip
    """cpp_extensions/gemm.py, and the conditions of common/gemm/cublaslt_gemm.cu. On Blackwell no operand has fp32
    scales of blocks: TE's modules convert such operands to MXFP8 first.
    """
    assert quantization_params is gelu_in is beta is bias is ub is ub_type is extra_output is None
    assert not (gelu or grad or bulk_overlap) and alpha == 1.0
    assert layout == "TN" and use_split_accumulator and out_dtype in (torch.float32, torch.bfloat16)
    assert {A._fp8_dtype, B._fp8_dtype} != {"kFloat8E5M2"}, "cuBLAS has no GEMM of two E5M2 operands"
    assert type(A) is type(B)
    matrix, rows = A.dequantize(), B.dequantize()
    assert matrix.shape[1] == rows.shape[1] and rows.shape[1] % 16 == 0
    if isinstance(A, Float8BlockwiseQTensorStorage):
        assert Device(torch.device("cpu"), "gloo").capability[0] == 9, "block scales need Hopper"
        assert not (A._is_2D_scaled and B._is_2D_scaled)
        assert matrix.shape[0] % 8 == 0 and (B._is_2D_scaled or rows.shape[0] % 8 == 0)
    general_gemm.calls += 1  # type: ignore[attr-defined]
    product = (rows @ matrix.t()).to(out_dtype)
    if out is None:
        assert not accumulate
        return product, None, None, None
    assert out.is_contiguous() and out.dtype == out_dtype and out.shape == product.shape
    return out.copy_(out + product if accumulate else product), None, None, None


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Install the stand-in; the result sets the capabilities of its GPU."""
    gpu = SimpleNamespace(fp8=(True, ""), blocks=(True, ""), capability=(9, 0))
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {
            "is_fp8_available": lambda return_reason=False: gpu.fp8 if return_reason else gpu.fp8[0],
            "is_fp8_block_scaling_available": lambda return_reason=False: (
                gpu.blocks if return_reason else gpu.blocks[0]
            ),
        },
        "transformer_engine.pytorch.constants": {"TE_DType": {dtype: name for name, dtype in FORMATS.items()}},
        "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
        "transformer_engine.pytorch.tensor": {},
        "transformer_engine.pytorch.tensor.storage": {
            "Float8TensorStorage": Float8TensorStorage,
            "Float8BlockwiseQTensorStorage": Float8BlockwiseQTensorStorage,
        },
    }
    for name, content in contents.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Device, "capability", property(lambda self: gpu.capability))
    monkeypatch.setattr(general_gemm, "calls", 0, raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")  # torch computes the rest
    return gpu


def of(recipe: str | None, dtype: torch.dtype = torch.bfloat16, device: Device | None = None) -> OpContext:
    model = {"hidden_size": K, "num_heads": 5, "num_kv_heads": 5}
    context = setting(dtype, **model) if device is None else setting(dtype, device, **model)
    return replace(context, recipe=recipe)


def kernels() -> Fp8Kernels:
    return TEFp8().build(of("tensorwise"))


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw numbers of growing rows and columns, to expose a misplaced scale."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x * torch.linspace(1, 8, shape[0]).view(-1, *[1] * (len(shape) - 1)) * torch.linspace(1, 8, shape[-1])


def quantized(
    x: Tensor, grain: ScaleBlock, fp8_format: ElementFormat = ElementFormat.E4M3, by: Fp8Kernels = Fp8Kernels()
) -> Quantized:
    quantizer = Quantizer(QuantizerSpec(fp8_format.name.lower(), grain), by)
    return quantizer.encode(x)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


# Casts and GEMMs.


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_casts_and_gemms_equal_torchs(recipe: str, dtype: torch.dtype) -> None:
    worst = difference("linear", "te", of(recipe, dtype))
    assert 0 < worst < TOLERANCES[dtype] / 5
    assert general_gemm.calls == 3  # type: ignore[attr-defined]


GEMMS = [
    (TENSOR, TENSOR),
    (BLOCK_1D, BLOCK_2D),
    (BLOCK_1D, BLOCK_1D),
]


@pytest.mark.parametrize(("grain_a", "grain_b"), GEMMS)
@pytest.mark.parametrize("fp8_format", [ElementFormat.E4M3, ElementFormat.E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(M, K), (16, 8, K), (24, K)])
def test_a_gemm_equals_that_of_the_dequantized_operands(
    grain_a: ScaleBlock,
    grain_b: ScaleBlock,
    fp8_format: ElementFormat,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    a, b = quantized(normal(*shape), grain_a, fp8_format), quantized(normal(N, K, seed=1), grain_b)
    actual = te_scaled_matmul()(a, b, dtype)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    assert actual.dtype == dtype and actual.shape == (*shape[:-1], N)
    assert error(actual, exact) < (1e-6 if dtype == torch.float32 else 2**-8)
    assert general_gemm.calls == 1  # type: ignore[attr-defined]


def test_on_blackwell_tensors_are_multiplied_and_blocks_refused(engine: SimpleNamespace) -> None:
    engine.capability = (10, 0)
    a, b = (quantized(normal(*shape), TENSOR) for shape in ((M, K), (N, K)))
    total, exact = torch.zeros(M, N), a.dequantize().double() @ b.dequantize().double().t()
    kernels().scaled_wgrad(total, a, b, True)
    for found in (te_scaled_matmul()(a, b, torch.float32), total):
        assert error(found, exact) < 1e-6
    with pytest.raises(AssertionError, match="block scales need Hopper"):
        te_scaled_matmul()(quantized(normal(M, K), BLOCK_1D), quantized(normal(N, K), BLOCK_2D), torch.float32)


@pytest.mark.parametrize(("grain_a", "grain_b"), GEMMS)
def test_sliced_and_transposed_operands_have_valid_layouts(grain_a: ScaleBlock, grain_b: ScaleBlock) -> None:
    a, b = quantized(normal(32, 4, K), grain_a), quantized(normal(N, K, seed=1), grain_b)
    if grain_b != BLOCK_1D:
        b = quantized(normal(K, N, seed=1), grain_b).t()
    full = te_scaled_matmul()(a, b, torch.float32)
    assert error(full, fp8.scaled_matmul(a, b, torch.float32)) < 1e-6
    assert error(te_scaled_matmul()(a[8:20], b, torch.float32), full[8:20]) < 1e-6
    assert general_gemm.calls == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rows", "grain_a", "grain_b"),
    [
        (20, *GEMMS[0]),
        (20, *GEMMS[1]),
        (M, ROW, ROW),
        (M, TENSOR, ROW),
    ],
)
def test_gemms_unsupported_by_te_are_torchs(rows: int, grain_a: ScaleBlock, grain_b: ScaleBlock) -> None:
    a, b = quantized(normal(rows, K), grain_a), quantized(normal(N, K, seed=1), grain_b)
    assert torch.equal(te_scaled_matmul()(a, b, torch.float32), fp8.scaled_matmul(a, b, torch.float32))
    assert general_gemm.calls == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("grain", [TENSOR, BLOCK_1D])
def test_weights_gradients_accumulate_in_the_gemm(grain: ScaleBlock) -> None:
    a, b = quantized(normal(M, K), grain, ElementFormat.E5M2), quantized(normal(N, K, seed=1), grain)
    total, exact = torch.full((M, N), math.nan), a.dequantize().double() @ b.dequantize().double().t()
    for micro_batch, add in enumerate((False, True), 1):
        kernels().scaled_wgrad(total, a, b, add)
        assert error(total, micro_batch * exact) < 1e-6
    assert general_gemm.calls == 2  # type: ignore[attr-defined]


def test_weights_gradients_unsupported_by_te_are_the_others() -> None:
    a, b = quantized(normal(M, K), ROW), quantized(normal(N, K, seed=1), ROW)
    total, theirs = torch.zeros(M, N), torch.zeros(M, N)
    kernels().scaled_wgrad(total, a, b, True)
    fp8.scaled_wgrad(theirs, a, b, True)
    assert torch.equal(total, theirs) and general_gemm.calls == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(("grain_a", "grain_b"), GEMMS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nan_and_infinity_propagate(grain_a: ScaleBlock, grain_b: ScaleBlock, value: float) -> None:
    x = normal(M, K)
    x[3, 5] = value
    a, b = quantized(x, grain_a, by=kernels()), quantized(normal(N, K, seed=1), grain_b, by=kernels())
    assert not bool(kernels().scaled_matmul(a, b, torch.bfloat16)[3].isfinite().any())
    assert not bool(kernels().amax(x, grain_a).isfinite().all())


def test_the_block_size_is_the_librarys() -> None:
    assert BLOCK == 128


# Support.


def set_version(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(library, "distribution", lambda package: SimpleNamespace(version=installed, files=[]))
    library.error_of_import.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    set_version(monkeypatch, "2.20.2")
    yield
    library.error_of_import.cache_clear()  # the cache remembers the stand-in


def reason(recipe: str | None, device: Device | None = GPU) -> str | None:
    return unsupported_reason("linear", "te", of(recipe, device=device))


def test_a_missing_gpu_or_library_is_the_reason() -> None:
    assert reason("tensorwise", None) == "needs a GPU"
    assert reason("tensorwise") == "transformer_engine is not installed"


@pytest.mark.usefixtures("installed")
def test_supported_recipes() -> None:
    assert {name: reason(name) for name in RECIPES.names()} == {
        name: None if name in SERVED else f"has no scales by {RECIPES[name].facts['granularity']}"
        for name in RECIPES.names()
    }
    assert reason(None) == "is for train.precision = 'fp8' only"


@pytest.mark.usefixtures("installed")
def test_te_is_selected_for_supported_recipes() -> None:
    assert select_backend("linear", of("blockwise", device=GPU)).backend == "te"
    choice = select_backend("linear", of("rowwise", device=GPU))
    assert choice.backend != "te" and choice.rejected["te"] == "has no scales by row"


@pytest.mark.usefixtures("installed")
def test_a_recipe_unsupported_by_the_gpu_is_refused(engine: SimpleNamespace) -> None:
    engine.blocks = (False, "needs CUDA 12.9")
    assert reason("tensorwise") is None and reason("blockwise") == "needs CUDA 12.9"
    engine.blocks, engine.capability = (True, ""), (10, 0)
    assert reason("tensorwise") is None
    assert reason("blockwise") == "supports block scales as powers of two only on this GPU"
    engine.fp8, engine.capability = (False, "needs capability 8.9"), (8, 0)
    assert reason("tensorwise") == "needs capability 8.9"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("version", ["2.1.0", "2.11.0", "2.21.0.dev0"])
def test_versions_with_other_signatures_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, version)
    assert reason("tensorwise") == f"transformer_engine {version} is not one of {TE_GEMM.versions}"
