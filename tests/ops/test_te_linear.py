"""How Transformer Engine's casts and products are called: beside a stand-in that has the signatures of versions 2.12 to
2.20, reads what its C++ reads, as it lies in memory, and computes the formulas. The kernels themselves need a GPU:
`megascale doctor` tests them there.
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

from megascale.catalog.recipes import RECIPES
from megascale.device import Device
from megascale.ops import fp8, library
from megascale.ops.fp8 import BLOCK, Grain, Kernels, Number, Quantized, cast, scale_of
from megascale.ops.select import Setting, select
from megascale.ops.select import refusal as refusal_of
from megascale.ops.selftest import TOLERANCES, difference
from megascale.ops.te_linear import ENGINE, EngineLinear, product_of
from tests.ops.settings import GPU, setting

M, K, N = 256, 640, 384  # five blocks of k: the scales of squares are filled up to eight
SERVED = [name for name in RECIPES.names() if RECIPES[name].facts["grain"] != "row"]
FORMATS = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


# What stands in for the library.


class Float8TensorStorage:
    """tensor/storage/float8_tensor_storage.py"""

    def __init__(
        self, *, data: Tensor | None, fp8_scale_inv: Tensor, fp8_dtype: str, data_transpose: Tensor | None = None,
        quantizer: Any = None,
    ) -> None:  # fmt: skip
        self._data, self._scale_inv, self._fp8_dtype = data, fp8_scale_inv, fp8_dtype
        self._transpose = data_transpose

    def numbers(self) -> Tensor:
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

    def numbers(self) -> Tensor:
        found, scales = read(self._rowwise_data, self._fp8_dtype), self._rowwise_scale_inv
        rows, blocks = found.shape[0], math.ceil(found.shape[1] / 128)
        assert scales is not None and scales.is_contiguous() and scales.dtype == torch.float32
        if self._is_2D_scaled:
            assert scales.shape == (math.ceil(rows / 128), math.ceil(blocks / 4) * 4)
            scales = scales[:, :blocks].repeat_interleave(128, 0)
        else:
            assert scales.shape == (blocks, math.ceil(rows / 4) * 4)
            scales = scales.t()
        return found * scales.repeat_interleave(128, 1)


def read(data: Tensor | None, number: str) -> Tensor:
    """What a kernel finds at a pointer to a matrix."""
    assert data is not None and data.dim() == 2 and data.is_contiguous() and data.dtype == torch.uint8
    return data.view(FORMATS[number]).float()


class Float8Quantizer:
    """tensor/float8_tensor.py"""

    def __init__(
        self, scale: Tensor, amax: Tensor, fp8_dtype: str, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype
        self.rowwise_usage, self.columnwise_usage, self.internal = rowwise, columnwise, False


def quantize(tensor: Tensor, quantizer: Any, output: None = None, noop: None = None) -> Float8TensorStorage:
    """csrc/extensions/cast.cpp. The kernel multiplies by the scale, and rounds to the nearest that there is."""
    assert type(quantizer) is Float8Quantizer and quantizer.internal and output is noop is None
    assert quantizer.rowwise_usage and (tensor.dim() == 2 or not quantizer.columnwise_usage)
    for state in (quantizer.scale, quantizer.amax):
        assert state.shape == (1,) and state.dtype == torch.float32
    wide = tensor.contiguous().float()
    quantizer.amax.copy_(torch.fmax(quantizer.amax, wide.abs().nan_to_num(0, math.inf).amax()))
    format = FORMATS[quantizer.dtype]
    largest = torch.finfo(format).max
    data = (wide * quantizer.scale).clamp(-largest, largest).to(format).view(torch.uint8)
    across = data.t().contiguous() if quantizer.columnwise_usage and not quantize.blackwell else None
    quantize.transposes += across is not None
    inverse = 1 / quantizer.scale
    return Float8TensorStorage(data=data, fp8_scale_inv=inverse, fp8_dtype=quantizer.dtype, data_transpose=across)


def general_gemm(
    A: Any, B: Any, out_dtype: torch.dtype | None = None, quantization_params: None = None, gelu: bool = False,
    gelu_in: None = None, alpha: float = 1.0, beta: None = None, accumulate: bool = False, layout: str = "TN",
    out: None = None, bias: None = None, use_split_accumulator: bool = False, grad: bool = False, ub: None = None,
    ub_type: None = None, extra_output: None = None, bulk_overlap: bool = False,
) -> tuple[Tensor, None, None, None]:  # fmt: skip
    """cpp_extensions/gemm.py, and the conditions of common/gemm/cublaslt_gemm.cu."""
    assert quantization_params is gelu_in is beta is out is bias is ub is ub_type is extra_output is None
    assert not (gelu or accumulate or grad or bulk_overlap) and alpha == 1.0
    assert layout == "TN" and use_split_accumulator and out_dtype in (torch.float32, torch.bfloat16)
    assert {A._fp8_dtype, B._fp8_dtype} != {"kFloat8E5M2"}, "cuBLAS has no product of two e5m2"
    assert type(A) is type(B)
    matrix, rows = A.numbers(), B.numbers()
    assert matrix.shape[1] == rows.shape[1] and rows.shape[1] % 16 == 0
    if isinstance(A, Float8BlockwiseQTensorStorage):
        assert not (A._is_2D_scaled and B._is_2D_scaled)
        assert matrix.shape[0] % 8 == 0 and (B._is_2D_scaled or rows.shape[0] % 8 == 0)
    general_gemm.calls += 1  # type: ignore[attr-defined]
    return (rows @ matrix.t()).to(out_dtype), None, None, None


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The library, and what its GPU can do."""
    able = SimpleNamespace(fp8=(True, ""), blocks=(True, ""), capability=(9, 0))
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {
            "is_fp8_available": lambda return_reason=False: able.fp8 if return_reason else able.fp8[0],
            "is_fp8_block_scaling_available": lambda return_reason=False: (
                able.blocks if return_reason else able.blocks[0]
            ),
        },
        "transformer_engine.pytorch.constants": {"TE_DType": {dtype: name for name, dtype in FORMATS.items()}},
        "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
        "transformer_engine.pytorch.tensor": {},
        "transformer_engine.pytorch.tensor.float8_tensor": {"Float8Quantizer": Float8Quantizer},
        "transformer_engine.pytorch.tensor.storage": {
            "Float8TensorStorage": Float8TensorStorage,
            "Float8BlockwiseQTensorStorage": Float8BlockwiseQTensorStorage,
        },
        "transformer_engine_torch": {"quantize": quantize},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Device, "capability", property(lambda self: able.capability))
    monkeypatch.setattr(general_gemm, "calls", 0, raising=False)
    monkeypatch.setattr(quantize, "transposes", 0, raising=False)
    monkeypatch.setattr(quantize, "blackwell", False, raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")  # what is not the library's is torch's
    return able


def of(recipe: str | None, dtype: torch.dtype = torch.bfloat16, device: Device | None = None) -> Setting:
    model = {"hidden_size": K, "num_heads": 5, "num_kv_heads": 5}
    found = setting(dtype, **model) if device is None else setting(dtype, device, **model)
    return replace(found, recipe=recipe)


def kernels() -> Kernels:
    return EngineLinear().build(of("tensorwise"))


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Rows and columns differ in size, so that a scale in the wrong place is a wrong one."""
    found = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return found * torch.linspace(1, 8, shape[0]).view(-1, *[1] * (len(shape) - 1)) * torch.linspace(1, 8, shape[-1])


def quantized(x: Tensor, grain: Grain, number: Number = Number.E4M3, by: Kernels = Kernels()) -> Quantized:
    return cast(x, scale_of(by.amax(x, grain), number), number, grain, by)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# Casts and products.


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_computes_what_torch_does(recipe: str, dtype: torch.dtype) -> None:
    found = difference("linear", "te", of(recipe, dtype))
    assert 0 < found < TOLERANCES[dtype] / 5
    assert general_gemm.calls == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", list(Number))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(M, K), (8, 4, K)])
def test_a_cast_under_one_scale_is_torchs(shape: tuple[int, ...], dtype: torch.dtype, number: Number) -> None:
    x = normal(*shape).to(dtype)
    x.view(-1)[:4] = torch.tensor([math.inf, -math.inf, math.nan, 0.0])
    for scale in (0.003, 0.7, 1e5):  # most are too large; none; most become zero
        found, expected = (cast(x, torch.tensor(scale), number, Grain.TENSOR, by) for by in (kernels(), Kernels()))
        assert found.data.dtype == number.dtype and found.shape == x.shape
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))


@pytest.mark.parametrize("grain", [Grain.ROW, Grain.BLOCK, Grain.SQUARE])
def test_other_casts_are_torchs_own(grain: Grain) -> None:
    found, expected = (quantized(normal(M, K), grain, by=by).data for by in (kernels(), Kernels()))
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("blackwell", [False, True])
def test_both_layouts_come_of_one_cast_under_one_scale(blackwell: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "blackwell", blackwell)
    x = normal(8, 4, K).bfloat16()
    found, expected = (cast(x, torch.tensor(0.7), Number.E4M3, Grain.TENSOR, by, True) for by in (kernels(), Kernels()))
    assert found.across is not None and expected.across is None
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(found.t().data.view(torch.uint8), expected.t().data.view(torch.uint8))
    assert quantize.transposes == (not blackwell)  # type: ignore[attr-defined]


@pytest.mark.parametrize("grain", [Grain.ROW, Grain.BLOCK, Grain.SQUARE])
def test_transposes_under_other_scales_are_torchs(grain: Grain) -> None:
    x = normal(M, K)
    if grain is Grain.SQUARE:
        found, expected = (cast(x, scale_of(fp8.amax(x, grain), Number.E4M3), Number.E4M3, grain, by, True).t()
                           for by in (kernels(), Kernels()))  # fmt: skip
    else:
        found, expected = (quantized(by.turned(x), grain, by=by) for by in (kernels(), Kernels()))
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(found.scale, expected.scale) and found.data.is_contiguous()


PRODUCTS = [(Grain.TENSOR, Grain.TENSOR), (Grain.BLOCK, Grain.SQUARE), (Grain.BLOCK, Grain.BLOCK)]


@pytest.mark.parametrize(("grain_a", "grain_b"), PRODUCTS)
@pytest.mark.parametrize("number", list(Number))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(M, K), (16, 8, K), (24, K)])
def test_a_product_is_that_of_what_was_cast(
    grain_a: Grain, grain_b: Grain, number: Number, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    a, b = quantized(normal(*shape), grain_a, number), quantized(normal(N, K, seed=1), grain_b)
    found = product_of()(a, b, dtype)
    exact = a.dequantized().double() @ b.dequantized().double().t()
    assert found.dtype == dtype and found.shape == (*shape[:-1], N)
    assert error(found, exact) < (1e-6 if dtype == torch.float32 else 2**-8)
    assert general_gemm.calls == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("grain_a", "grain_b"), PRODUCTS)
def test_rows_of_a_factor_and_transposes_lie_as_they_must(grain_a: Grain, grain_b: Grain) -> None:
    a, b = quantized(normal(32, 4, K), grain_a), quantized(normal(N, K, seed=1), grain_b)
    if grain_b is not Grain.BLOCK:
        b = quantized(normal(K, N, seed=1), grain_b).t()
    whole = product_of()(a, b, torch.float32)
    assert error(whole, fp8.product(a, b, torch.float32)) < 1e-6
    assert error(product_of()(a[8:20], b, torch.float32), whole[8:20]) < 1e-6
    assert general_gemm.calls == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rows", "grain_a", "grain_b"),
    [(20, *PRODUCTS[0]), (20, *PRODUCTS[1]), (M, Grain.ROW, Grain.ROW), (M, Grain.TENSOR, Grain.ROW)],
)
def test_what_it_has_no_product_for_is_torchs(rows: int, grain_a: Grain, grain_b: Grain) -> None:
    a, b = quantized(normal(rows, K), grain_a), quantized(normal(N, K, seed=1), grain_b)
    assert torch.equal(product_of()(a, b, torch.float32), fp8.product(a, b, torch.float32))
    assert general_gemm.calls == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(("grain_a", "grain_b"), PRODUCTS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(grain_a: Grain, grain_b: Grain, value: float) -> None:
    x = normal(M, K)
    x[3, 5] = value
    a, b = quantized(x, grain_a, by=kernels()), quantized(normal(N, K, seed=1), grain_b, by=kernels())
    assert not bool(kernels().product(a, b, torch.bfloat16)[3].isfinite().any())
    assert not bool(kernels().amax(x, grain_a).isfinite().all())


def test_blocks_are_the_librarys() -> None:
    assert BLOCK == 128


# Where it serves.


def version(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(library, "distribution", lambda package: SimpleNamespace(version=found, files=[]))
    library.error_of_import.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    version(monkeypatch, "2.20.2")
    yield
    library.error_of_import.cache_clear()  # which remembers that the stand-in can be imported


def refusal(recipe: str | None, device: Device | None = GPU) -> str | None:
    return refusal_of("linear", "te", of(recipe, device=device))


def test_without_a_gpu_or_the_library_it_says_so() -> None:
    assert refusal("tensorwise", None) == "needs a GPU"
    assert refusal("tensorwise") == "transformer_engine is not installed"


@pytest.mark.usefixtures("installed")
def test_what_it_serves() -> None:
    assert {name: refusal(name) for name in RECIPES.names()} == {
        name: None if name in SERVED else "has no scales by row" for name in RECIPES.names()
    }
    assert refusal(None) == "casts to fp8, and nothing else"


@pytest.mark.usefixtures("installed")
def test_it_is_the_first_choice_where_it_serves() -> None:
    assert select("linear", of("blockwise", device=GPU)).backend == "te"
    passed = select("linear", of("rowwise", device=GPU))
    assert passed.backend != "te" and passed.refusals["te"] == "has no scales by row"


@pytest.mark.usefixtures("installed")
def test_what_the_gpu_cannot_do(engine: SimpleNamespace) -> None:
    engine.blocks = (False, "needs CUDA 12.9")
    assert refusal("tensorwise") is None and refusal("blockwise") == "needs CUDA 12.9"
    engine.blocks, engine.capability = (True, ""), (10, 0)
    assert refusal("tensorwise") is None
    assert refusal("blockwise") == "multiplies blocks under powers of two only on this GPU"
    engine.fp8, engine.capability = (False, "needs capability 8.9"), (8, 0)
    assert refusal("tensorwise") == "needs capability 8.9"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("found", ["2.1.0", "2.11.0", "2.21.0.dev0"])
def test_versions_that_are_called_otherwise_are_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version(monkeypatch, found)
    assert refusal("tensorwise") == f"transformer_engine {found} is not one of {ENGINE.versions}"
