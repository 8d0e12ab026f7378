"""The rate of matrix products that a device attains, in every number format, by shape (`megascale bench gemm`)."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.account.peaks import Peak, stated_peak
from megascale.bench.spread import Spread, between
from megascale.config.model import ModelConfig
from megascale.core.units import format_flops
from megascale.device import Device, out_of_memory
from megascale.layout.blocks import block, linears


class Shape(NamedTuple):
    """x [m, k] times a weight [n, k], as a linear layer multiplies."""

    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


@dataclass(frozen=True)
class Rate:
    """FLOP/s of one shape in one format; None with the `refusal` of a device that cannot."""

    shape: Shape
    format: str
    rate: Spread | None
    refusal: str = ""


PLAIN = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
FP8 = ("fp8", "fp8_fast", "fp8_tensorwise", "fp8_tensorwise_fast")
FORMATS = (*PLAIN, *FP8)
"""fp8 has a scale for each row of both operands, fp8_tensorwise one for each operand; all give bf16. `_fast`: with fast
accumulation, in which tensor cores keep the sums, with fewer bits than fp32.
"""

TYPICAL = ("llama3-8b", "gpt3-175b")
"""Presets whose products are measured where no shape is asked for, for ROWS tokens."""

ROWS = 8192

CACHE_BYTES = 256 << 20
"""Operands take turns in so many bytes, more than any device's cache holds: at most TURNS of them."""

TURNS = 64

TIMING_S = 1e-3
"""Products are timed in groups that take so long at least, next to which a moment's mark is nothing."""


def products(model: ModelConfig, rows: int) -> list[Shape]:
    """The GEMMs of a layer's forward on `rows` tokens, and last the head's."""
    layers = [Shape(rows, layer.inputs, layer.outputs) for layer in linears(block(model, 0))]
    return [*layers, Shape(rows, model.hidden_size, model.vocab_size)]


def typical(device: Device) -> list[Shape]:
    """What is measured where no shape is asked for."""
    sizes = (256, 512, 768, 1536) if device.is_cpu else (4096, 8192, 16384)
    squares = [Shape(size, size, size) for size in sizes]
    models = [] if device.is_cpu else [ModelConfig.model_validate({"preset": name}) for name in TYPICAL]
    return squares + [shape for model in models for shape in products(model, ROWS)]


def typical_formats(device: Device) -> tuple[str, ...]:
    """What is measured where no format is asked for: one scale for a whole operand takes a CPU a thousand times as
    long as one a row.
    """
    return ("fp32", "bf16", "fp8") if device.is_cpu else ("tf32", "bf16", *FP8)


def rates(
    shapes: Sequence[Shape], formats: Sequence[str], device: Device, *, repeats: int = 20, seconds: float = 0.3
) -> Iterator[Rate]:
    """Measure every shape in every one of FORMATS that is asked for: `repeats` timings or more, over `seconds` or more,
    for a GPU that gets hot slows down.
    """
    for shape, name in itertools.product(shapes, formats):
        try:
            with _tf32(name == "tf32"):
                yield Rate(shape, name, _rate(shape, name, device, repeats, seconds))
        except (RuntimeError, ValueError, NotImplementedError) as error:  # what a device or build of torch lacks
            full = isinstance(error, RuntimeError) and out_of_memory(error)
            reason = "does not fit the device's memory" if full else str(error).strip().split("\n")[0]
            yield Rate(shape, name, None, reason)


def best(found: Sequence[Rate], formats: Sequence[str]) -> tuple[float, Rate] | None:
    """The highest median rate in any of `formats`; None if there is none."""
    ran = [(rate.rate.median, rate) for rate in found if rate.rate is not None and rate.format in formats]
    return max(ran, key=lambda pair: pair[0], default=None)


def attainable(model: ModelConfig, rows: int, precision: str, device: Device) -> Peak | None:
    """The best rate among the model's own products in the format of `train.precision`; None if that has none. In fp8
    the best of FP8, on a CPU by rows, whichever of them training uses, and without the head, which is in bf16.
    """
    formats = tuple(name for name in typical_formats(device) if name in FP8) if precision == "fp8" else (precision,)
    if not set(formats) <= set(FORMATS):
        return None
    shapes = products(model, rows)[: -1 if precision == "fp8" else None]
    found = best(list(rates(shapes, formats, device, repeats=5, seconds=0.2)), formats)
    if found is None:
        return None
    rate, where = found
    return Peak(rate, f"{where.shape} in {where.format}, measured")


def _rate(shape: Shape, name: str, device: Device, repeats: int, seconds: float) -> Spread:
    multiply = _product(shape, name, device)
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
    return Spread.of([group * shape.flops / passed for passed in between(timer, marks)])


def _product(shape: Shape, name: str, device: Device) -> Callable[[], object]:
    """Multiplies operands that were not touched lately. They are random: a GPU that multiplies zeros draws less power,
    and runs faster than it would in training.
    """
    if device.is_cpu and (name == "tf32" or name.endswith("_fast")):
        raise ValueError("a format of GPUs")
    x, weight = (torch.randn(rows, shape.k, device=device.torch) for rows in (shape.m, shape.n))
    operands = _quantised(x, weight, name) if name in FP8 else (x.to(PLAIN[name]), weight.to(PLAIN[name]))
    size = sum(operand.nbytes for operand in operands)
    copies = [operands, *(tuple(o.clone() for o in operands) for _ in range(min(TURNS - 1, CACHE_BYTES // size)))]
    turns = itertools.cycle(copies)
    if name in FP8:
        return lambda: _scaled(*next(turns), fast=name.endswith("_fast"))
    out = torch.empty(shape.m, shape.n, dtype=PLAIN[name], device=device.torch)

    def multiply() -> None:
        a, b = next(turns)
        torch.mm(a, b.t(), out=out)

    return multiply


def _quantised(x: Tensor, weight: Tensor, name: str) -> tuple[Tensor, ...]:
    """Both operands in e4m3, and their scales: [m, 1] and [1, n], or of whole tensors."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    whole = name.startswith("fp8_tensorwise")
    scales = [t.abs().amax() if whole else t.abs().amax(1, keepdim=True) for t in (x, weight)]
    scales = [scale.float() / largest for scale in scales]
    a, b = ((t / scale).to(torch.float8_e4m3fn) for t, scale in zip((x, weight), scales, strict=True))
    return a, b, scales[0], scales[1] if whole else scales[1].t().contiguous()


def _scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast: bool) -> Tensor:
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


@contextlib.contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    """Whether products of fp32 may be computed in tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def table(found: Sequence[Rate], device: Device) -> str:
    """Rates for people, each with its share of what the maker states."""
    lines = [f"{device.name}, torch {torch.__version__}", f"{'m x k x n':>20}  {'format':19}  {'rate':>15}  stated"]
    for each in found:
        if each.rate is None:
            lines.append(f"{each.shape!s:>20}  {each.format:19}  n/a: {each.refusal[:70]}")
            continue
        peak = stated_peak(device.name, each.format.partition("_")[0])
        share = f"{each.rate.median / peak.flops:6.1%}" if peak else ""
        shown = f"{each.shape!s:>20}  {each.format:19}  {format_flops(each.rate.median):>15}  {share}"
        lines.append(shown.rstrip())
    return "\n".join(lines)


def as_json(found: Sequence[Rate], device: Device) -> dict[str, Any]:
    """Rates as plain values, and the best one of each format."""
    names = dict.fromkeys(each.format for each in found)
    tops = {name: top[0] for name in names if (top := best(found, [name])) is not None}
    listed = [asdict(each) | {"shape": str(each.shape)} for each in found]
    return {"device": device.name, "torch": torch.__version__, "attainable": tops, "rates": listed}
