"""GEMM throughput of a device by shape and dtype (`megascale bench gemm`), and the peak that a model's GEMMs attain."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import shorten
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megascale.bench.quartiles import Quartiles, intervals
from megascale.catalog.accelerators import Peak, stated_peak
from megascale.config.model import ModelConfig
from megascale.core.units import format_flops
from megascale.device import Device, is_out_of_memory
from megascale.layout.blocks import block_spec, linears
from megascale.ops.fp8 import TORCH_KERNELS
from megascale.ops.quantized import Quantized
from megascale.ops.recipe import build_recipe


class GemmShape(NamedTuple):
    """GEMM of a linear layer: x [m, k] times weight [n, k]."""

    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


@dataclass(frozen=True)
class GemmRate:
    """FLOP/s of one shape in one dtype; None, with `unsupported_reason`, if the device cannot run the GEMM."""

    shape: GemmShape
    format: str
    rate: Quartiles | None
    unsupported_reason: str = ""


BLACKWELL = 10  # compute capability
X = TypeVar("X", Tensor, Quantized)

TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
FP8_FORMATS = ("fp8", "fp8_fast", "fp8_tensorwise", "fp8_tensorwise_fast")
BLOCK_FORMATS = ("mxfp8", "nvfp4")
FORMATS = (*TORCH_DTYPES, *FP8_FORMATS, *BLOCK_FORMATS)
"""fp8 has a scale per row of both operands, fp8_tensorwise a scale per operand; the result is bf16. `_fast` uses fast
accumulation: sums stay in the tensor cores, in fewer bits than fp32. mxfp8 and nvfp4 have a scale per 32 and 16
elements, on tensor cores that take them; a GEMM puts scales in their order first, as in training.
"""

DEFAULT_PRESETS = ("llama3-8b", "gpt3-175b")
"""Presets whose GEMMs, with DEFAULT_TOKENS tokens, are measured on a GPU by default."""

DEFAULT_TOKENS = 8192

CACHE_BYTES = 256 << 20
"""Bytes of operand copies to rotate through, more than any device's cache; at most MAX_OPERAND_COPIES copies."""

MAX_OPERAND_COPIES = 64

TIMING_S = 1e-3  # minimum seconds of a timed group of GEMMs: a timer's mark is negligible beside a group


def model_gemms(model: ModelConfig, rows: int) -> list[GemmShape]:
    """List the forward GEMMs of one layer on `rows` tokens, and last the head's."""
    layers = [GemmShape(rows, layer.inputs, layer.outputs) for layer in linears(block_spec(model, 0))]
    return [*layers, GemmShape(rows, model.hidden_size, model.vocab_size)]


def default_shapes(device: Device) -> list[GemmShape]:
    """Shapes to measure if the user gives none."""
    sizes = (256, 512, 768, 1536) if device.is_cpu else (4096, 8192, 16384)
    squares = [GemmShape(size, size, size) for size in sizes]
    models = [] if device.is_cpu else [ModelConfig.model_validate({"preset": name}) for name in DEFAULT_PRESETS]
    return squares + [shape for model in models for shape in model_gemms(model, DEFAULT_TOKENS)]


def default_formats(device: Device) -> tuple[str, ...]:
    """Dtypes to measure if the user gives none. On a CPU tensorwise FP8 is a thousand times slower than rowwise."""
    if device.is_cpu:
        return ("fp32", "bf16", "fp8")
    return ("tf32", "bf16", *FP8_FORMATS, *(BLOCK_FORMATS if device.capability[0] == BLACKWELL else ()))


def measure_rates(
    shapes: Sequence[GemmShape], formats: Sequence[str], device: Device, *, repeats: int = 20, seconds: float = 0.3
) -> Iterator[GemmRate]:
    """Measure every shape in every dtype, `repeats` times or more, for at least `seconds` as a hot GPU is slower."""
    for shape, name in itertools.product(shapes, formats):
        try:
            with _tf32(name == "tf32"):
                yield GemmRate(shape, name, _rate(shape, name, device, repeats, seconds))
        except (RuntimeError, ValueError, NotImplementedError) as error:  # the device or torch build lacks the GEMM
            full = isinstance(error, RuntimeError) and is_out_of_memory(error)
            reason = "does not fit the device's memory" if full else str(error).strip().split("\n")[0]
            yield GemmRate(shape, name, None, reason)


def highest_rate(measured: Sequence[GemmRate], formats: Sequence[str]) -> tuple[float, GemmRate] | None:
    """Return the highest median rate in any of `formats`; None if none could run."""
    ran = [(rate.rate.median, rate) for rate in measured if rate.rate is not None and rate.format in formats]
    return max(ran, key=lambda pair: pair[0], default=None)


def attainable_peak(model: ModelConfig, rows: int, precision: str, device: Device) -> Peak | None:
    """Measure the highest rate among the model's own GEMMs in the dtype of `train.precision`; None if no GEMM runs in
    that dtype. FP8 takes the best FP8 variant, whichever training uses, and leaves out the head, which is in bf16.
    """
    is_fp8 = precision == "fp8"
    formats = tuple(name for name in default_formats(device) if name in FP8_FORMATS) if is_fp8 else (precision,)
    if not set(formats) <= set(FORMATS):
        return None
    shapes = model_gemms(model, rows)[: -1 if is_fp8 else None]
    best_rate = highest_rate(list(measure_rates(shapes, formats, device, repeats=5, seconds=0.2)), formats)
    if best_rate is None:
        return None
    rate, where = best_rate
    return Peak(rate, f"{where.shape} in {where.format}, measured")


def _rate(shape: GemmShape, name: str, device: Device, repeats: int, seconds: float) -> Quartiles:
    multiply = gemm_fn(shape, name, device)
    for _ in range(3):
        multiply()
    device.synchronize()
    start = time.perf_counter()
    multiply()
    device.synchronize()
    once = max(time.perf_counter() - start, 1e-7)
    group = max(1, math.ceil(TIMING_S / once))
    timer = device.timer()
    marks = [timer.mark()]
    for _ in range(max(repeats, math.ceil(seconds / (group * once)))):
        for _ in range(group):
            multiply()
        marks.append(timer.mark())
    device.synchronize()
    return Quartiles.from_values([group * shape.flops / passed for passed in intervals(timer, marks)])


def gemm_fn(shape: GemmShape, name: str, device: Device) -> Callable[[], object]:
    """Return a function that runs the GEMM on operands not in a cache. Operands are random: on zeros a GPU draws less
    power, and runs faster than in training.
    """
    if device.is_cpu and (name == "tf32" or name.endswith("_fast")):
        raise ValueError("a GPU-only dtype")
    x, weight = (torch.randn(rows, shape.k, device=device.torch_device) for rows in (shape.m, shape.n))
    if name in BLOCK_FORMATS:
        return _block_scaled(x, weight, name, device)
    is_fp8 = name in FP8_FORMATS
    operands = _quantize(x, weight, name) if is_fp8 else tuple(each.to(TORCH_DTYPES[name]) for each in (x, weight))
    turns = _in_turn(operands, torch.clone)
    if is_fp8:
        return lambda: _scaled(*next(turns), fast=name.endswith("_fast"))
    out = torch.empty(shape.m, shape.n, dtype=TORCH_DTYPES[name], device=device.torch_device)

    def multiply() -> None:
        a, b = next(turns)
        torch.mm(a, b.t(), out=out)

    return multiply


def _in_turn(operands: Sequence[X], copy: Callable[[X], X]) -> Iterator[Sequence[X]]:
    """Return operands in turn with copies, more than a cache holds."""
    more: int = min(MAX_OPERAND_COPIES - 1, CACHE_BYTES // sum(operand.nbytes for operand in operands))
    turns: list[Sequence[X]] = [operands]
    turns += ([copy(each) for each in operands] for _ in range(more))
    return itertools.cycle(turns)


def _block_scaled(x: Tensor, weight: Tensor, name: str, device: Device) -> Callable[[], object]:
    """Return the GEMM of a recipe with scales per block. Raises: ValueError where tensor cores do not take them"""
    if device.capability[0] != BLACKWELL:
        raise ValueError(f"tensor cores of compute capability {BLACKWELL} alone take its scales: operands are decoded")
    recipe = build_recipe(name, replace(TORCH_KERNELS, capability=device.capability))
    operands = (recipe.rows["input"].encode(x.bfloat16()), recipe.rows["weight"].encode(weight.bfloat16()))
    turns = _in_turn(operands, lambda each: replace(each, data=each.codes.clone().view(each.data.dtype)))

    def multiply() -> None:
        a, b = next(turns)
        recipe.gemm(a, b, torch.bfloat16)

    return multiply


def _quantize(x: Tensor, weight: Tensor, name: str) -> tuple[Tensor, ...]:
    """Quantize both operands to e4m3; return them with their scales, [m, 1] and [1, n] or scalars."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    tensorwise = name.startswith("fp8_tensorwise")
    scales = [t.abs().amax() if tensorwise else t.abs().amax(1, keepdim=True) for t in (x, weight)]
    scales = [scale.float() / largest for scale in scales]
    a, b = ((t / scale).to(torch.float8_e4m3fn) for t, scale in zip((x, weight), scales, strict=True))
    return a, b, scales[0], scales[1] if tensorwise else scales[1].t().contiguous()


def _scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast: bool) -> Tensor:
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


@contextlib.contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def table(measured: Sequence[GemmRate], device: Device) -> str:
    """Format rates as a text table, with the share of the vendor's peak."""
    lines = [f"{device.name}, torch {torch.__version__}", f"{'m x k x n':>20}  {'format':19}  {'rate':>15}  of peak"]
    for gemm in measured:
        if gemm.rate is None:
            lines.append(f"{gemm.shape!s:>20}  {gemm.format:19}  n/a: {shorten(gemm.unsupported_reason, 90)}")
            continue
        stated = gemm.format.partition("_")[0]
        peak = stated_peak(device.name, "fp8" if stated == "mxfp8" else stated)
        share = f"{gemm.rate.median / peak.flops:6.1%}" if peak else ""
        row = f"{gemm.shape!s:>20}  {gemm.format:19}  {format_flops(gemm.rate.median):>15}  {share}"
        lines.append(row.rstrip())
    return "\n".join(lines)


def as_json(measured: Sequence[GemmRate], device: Device) -> dict[str, Any]:
    """Return rates, and the best rate of every dtype, as JSON values."""
    names = dict.fromkeys(gemm.format for gemm in measured)
    tops = {name: top[0] for name in names if (top := highest_rate(measured, [name])) is not None}
    rates = [asdict(gemm) | {"shape": str(gemm.shape)} for gemm in measured]
    return {"device": device.name, "torch": torch.__version__, "attainable": tops, "rates": rates}
