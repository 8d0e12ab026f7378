"""GEMM throughput by shape and dtype."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megascale.bench import gemm
from megascale.bench.gemm import GemmRate, GemmShape
from megascale.bench.quartiles import Quartiles
from megascale.cli.main import main
from megascale.config.model import ModelConfig
from megascale.device import Device
from megascale.plan.account.flops import token_flops
from tests import blackwell

CPU = Device(torch.device("cpu"), "gloo")


def hopper(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(Device, "capability", property(lambda self: (9, 0)))
    return Device(torch.device("cuda"), "nccl")


@pytest.mark.parametrize("preset", ["llama3-8b", "gpt3-175b"])
def test_a_models_gemms_have_its_flops(preset: str) -> None:
    model = ModelConfig(preset=preset, num_layers=1)
    assert sum(shape.flops for shape in gemm.model_gemms(model, 8)) == 8 * token_flops(model).linear / 3


def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with one operand copy and without a minimum time."""
    monkeypatch.setattr(gemm, "CACHE_BYTES", 0)
    monkeypatch.setattr(gemm, "TIMING_S", 0.0)


def test_gemms_are_timed_by_marks_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a clock that advances a second per reading: a group of one GEMM takes one second."""
    once(monkeypatch)
    ticks = itertools.count()
    monkeypatch.setattr(gemm.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(gemm, "TIMING_S", 0.5)
    (rate,) = gemm.measure_rates([GemmShape(3, 5, 7)], ["fp32"], CPU, repeats=4, seconds=6.0)
    assert rate == GemmRate(
        GemmShape(3, 5, 7), "fp32", Quartiles(210.0, 210.0, 210.0, 6)
    )  # 6 seconds are more than 4 groups


@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16", "fp8"])
def test_every_dtype_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once(monkeypatch)
    (rate,) = gemm.measure_rates([GemmShape(32, 64, 48)], [name], CPU, repeats=3, seconds=0.0)
    assert rate.rate is not None and rate.rate.low > 0
    assert rate.rate.count == 3


@pytest.mark.parametrize("name", gemm.FP8_FORMATS)
def test_fp8_operands_dequantize_to_their_values(name: str) -> None:
    x, weight = torch.randn(32, 64), 1e-3 * torch.randn(48, 64)
    a, b, *scales = gemm._quantize(x, weight, name)
    assert [scale.numel() for scale in scales] == ([1, 1] if "tensorwise" in name else [32, 48])
    out = gemm._scaled(a, b, *scales, fast=False).float()
    exact = x @ weight.t()
    assert (out - exact).norm() / exact.norm() < 0.05


def test_a_gpus_fp8_is_measured_with_fast_accumulation_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype's name decides about fast accumulation. Training does not use it, peers may."""
    gpu = hopper(monkeypatch)
    names = [name for name in gemm.default_formats(gpu) if name in gemm.FP8_FORMATS]
    assert names == ["fp8", "fp8_fast", "fp8_tensorwise", "fp8_tensorwise_fast"]
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, scale, *_, use_fast_accum, **__: asked.append((scale.numel(), use_fast_accum))
    )
    monkeypatch.setattr(Device, "is_cpu", property(lambda self: False))
    for name in names:
        gemm.gemm_fn(GemmShape(16, 32, 48), name, CPU)()
    assert asked == [(16, False), (16, True), (1, False), (1, True)]


@pytest.mark.parametrize("name", gemm.BLOCK_FORMATS)
def test_formats_with_scales_of_blocks_need_their_tensor_cores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once(monkeypatch)
    shape, calls = GemmShape(32, 64, 48), list[Any]()
    (decoded,) = gemm.measure_rates([shape], [name], CPU, repeats=2, seconds=0.0)
    assert decoded.unsupported_reason.startswith("tensor cores of compute capability 10 alone take its scales")

    def operator(*given: Any, **more: Any) -> torch.Tensor:
        calls.append(given)
        return blackwell.scaled_mm(*given, **more)

    monkeypatch.setattr(F, "scaled_mm", operator)
    monkeypatch.setattr(Device, "capability", property(lambda self: (10, 0)))
    (rate,) = gemm.measure_rates([shape], [name], CPU, repeats=3, seconds=0.0)
    assert rate.rate is not None and rate.rate.count == 3 and len(calls) > 3
    monkeypatch.setattr(Device, "is_cpu", property(lambda self: False))
    assert set(gemm.BLOCK_FORMATS) <= {*gemm.default_formats(CPU)}
    monkeypatch.setattr(Device, "name", "NVIDIA B200")
    half = Quartiles(4.5e15 if name == "nvfp4" else 2.25e15, 0.0, math.inf, 3)
    assert gemm.table([GemmRate(shape, name, half)], CPU).endswith("50.0%")


def test_operand_copies_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = GemmShape(16, 16, 16)
    monkeypatch.setattr(gemm, "CACHE_BYTES", 3 * 2 * 16 * 16 * 4)
    seen: list[int] = []
    monkeypatch.setattr(torch, "mm", lambda a, b, out: seen.append(a.data_ptr()))
    multiply = gemm.gemm_fn(shape, "fp32", CPU)
    for _ in range(8):
        multiply()
    assert len(set(seen)) == 4
    assert seen[:4] == seen[4:]


def test_an_unsupported_dtype_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on newer devices\nat some line of C++")

    once(monkeypatch)
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    before = torch.get_float32_matmul_precision()
    formats = ["tf32", "fp8_fast", "fp8", "fp32"]
    rates = list(gemm.measure_rates([GemmShape(16, 16, 16)], formats, CPU, repeats=2, seconds=0.0))
    assert [each.unsupported_reason for each in rates] == [
        "a GPU-only dtype", "a GPU-only dtype", "torch._scaled_mm is only supported on newer devices", "",
    ]  # fmt: skip
    assert [each.rate is None for each in rates] == [True, True, True, False]
    assert "fp8                  n/a: torch._scaled_mm is only" in gemm.table(rates, CPU)
    assert gemm.highest_rate(rates, ["fp8"]) is None
    assert torch.get_float32_matmul_precision() == before


def test_attainable_is_the_best_of_the_models_own_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(preset="gpt2-124m")
    monkeypatch.setattr(
        gemm, "_rate", lambda shape, name, *_: Quartiles(float(shape.n) + (name == "bf16"), 0.0, math.inf, 3)
    )
    peak = gemm.attainable_peak(model, 64, "bf16", CPU)
    assert peak is not None
    assert peak.flops == model.vocab_size + 1
    assert peak.source == "64x768x50257 in bf16, measured"
    assert "64x768x3072 in fp8, measured" in str(gemm.attainable_peak(model, 64, "fp8", CPU))  # the head is not in fp8
    assert gemm.attainable_peak(model, 64, "int4", CPU) is None


def test_attainable_in_fp8_is_the_best_variant_of_a_gpu_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"fp8": 2.0, "fp8_fast": 4.0, "fp8_tensorwise": 3.0, "fp8_tensorwise_fast": 5.0}
    monkeypatch.setattr(gemm, "_rate", lambda shape, name, *_: Quartiles(speeds[name], 0.0, math.inf, 3))
    gpu = hopper(monkeypatch)
    peak = gemm.attainable_peak(ModelConfig(preset="gpt2-124m"), 64, "fp8", gpu)
    assert peak is not None and (peak.flops, peak.source[-32:]) == (5.0, "in fp8_tensorwise_fast, measured")
    speeds["fp8"] = 6.0
    assert str(gemm.attainable_peak(ModelConfig(preset="gpt2-124m"), 64, "fp8", gpu)).endswith("in fp8, measured')")


def test_every_fp8_variant_is_relative_to_the_vendors_fp8_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "name", "NVIDIA H100 80GB HBM3")
    half = Quartiles(1978.9e12 / 2, 0.0, math.inf, 3)
    shown = gemm.table([GemmRate(GemmShape(8, 8, 8), name, half) for name in gemm.FP8_FORMATS], CPU).splitlines()[2:]
    assert [line.split()[1] for line in shown] == list(gemm.FP8_FORMATS)
    assert all(line.endswith("50.0%") for line in shown)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    once(monkeypatch)
    words = ["bench", "gemm", "--sizes", "32x32x32", "16X32x64", "--dtypes", "fp32", "bf16"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [
        ["32x32x32", "fp32"], ["32x32x32", "bf16"], ["16x32x64", "fp32"], ["16x32x64", "bf16"],
    ]  # fmt: skip
    assert all(line.endswith("FLOP/s") for line in lines[2:])
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["rates"]) == 4
    for name, top in shown["attainable"].items():
        assert top == max(rate["rate"]["median"] for rate in shown["rates"] if rate["format"] == name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sizes 8x8", "'8x8' is not a GEMM shape: give MxKxN"),
        ("--sizes 8x0x8", "'8x0x8' is not a GEMM shape"),
    ],
)
def test_mistakes(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "gemm", *words.split()])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_an_unknown_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gemm", "--dtypes", "bf16", "int4"]) == 2
    assert (
        "--dtypes: unknown dtype 'int4'  -> choose from fp64, fp32, tf32, bf16, fp8, fp8_fast"
        in capsys.readouterr().err
    )


def test_nothing_could_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in (
        (["--sizes", "8x8x8", "--dtypes", "fp8_fast"], "a GPU-only dtype"),
        (["--sizes", "99999999x9999999x8", "--dtypes", "bf16"], "does not fit the device's memory"),
    ):
        assert main(["bench", "gemm", *words]) == 1
        shown = capsys.readouterr()
        assert f"n/a: {reason}" in shown.out
        assert f"no GEMM could be measured: {reason}  -> give other --sizes or --dtypes" in shown.err
