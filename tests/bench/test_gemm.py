"""The rates of GEMMs by shape and format."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch

from megascale.account.flops import token_flops
from megascale.bench import gemm
from megascale.bench.gemm import Rate, Shape
from megascale.bench.spread import Spread
from megascale.cli.main import main
from megascale.config.model import ModelConfig
from megascale.device import Device

CPU = Device(torch.device("cpu"), "gloo")


@pytest.mark.parametrize("preset", ["llama3-8b", "gpt3-175b"])
def test_a_models_products_are_its_flops(preset: str) -> None:
    model = ModelConfig(preset=preset, num_layers=1)
    assert sum(shape.flops for shape in gemm.products(model, 8)) == 8 * token_flops(model).linear / 3


def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache to fill, and no time to wait for."""
    monkeypatch.setattr(gemm, "CACHE_BYTES", 0)
    monkeypatch.setattr(gemm, "TIMING_S", 0.0)


def test_products_are_counted_over_marks_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks a second at each look: each group of one product takes one."""
    once(monkeypatch)
    ticks = itertools.count()
    monkeypatch.setattr(gemm.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(gemm, "TIMING_S", 0.5)
    (found,) = gemm.rates([Shape(3, 5, 7)], ["fp32"], CPU, repeats=4, seconds=6.0)
    assert found == Rate(Shape(3, 5, 7), "fp32", Spread(210.0, 210.0, 210.0, 6))  # 6 seconds are more than 4 groups


@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16", "fp8"])
def test_every_format_multiplies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once(monkeypatch)
    (found,) = gemm.rates([Shape(32, 64, 48)], [name], CPU, repeats=3, seconds=0.0)
    assert found.rate is not None and found.rate.low > 0
    assert found.rate.count == 3


@pytest.mark.parametrize("name", gemm.FP8)
def test_fp8_operands_are_scaled_to_what_they_stand_for(name: str) -> None:
    x, weight = torch.randn(32, 64), 1e-3 * torch.randn(48, 64)
    a, b, *scales = gemm._quantised(x, weight, name)
    assert [scale.numel() for scale in scales] == ([1, 1] if "tensorwise" in name else [32, 48])
    found = gemm._scaled(a, b, *scales, fast=False).float()
    exact = x @ weight.t()
    assert (found - exact).norm() / exact.norm() < 0.05


def test_a_gpus_fp8_is_measured_with_fast_accumulation_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each format says of it is what the product is asked for. Training does without, peers may do with."""
    gpu = Device(torch.device("cuda"), "nccl")
    names = [name for name in gemm.typical_formats(gpu) if name in gemm.FP8]
    assert names == ["fp8", "fp8_fast", "fp8_tensorwise", "fp8_tensorwise_fast"]
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, scale, *_, use_fast_accum, **__: asked.append((scale.numel(), use_fast_accum))
    )
    monkeypatch.setattr(Device, "is_cpu", property(lambda self: False))
    for name in names:
        gemm._product(Shape(16, 32, 48), name, CPU)()
    assert asked == [(16, False), (16, True), (1, False), (1, True)]


def test_operands_take_turns_in_more_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(16, 16, 16)
    monkeypatch.setattr(gemm, "CACHE_BYTES", 3 * 2 * 16 * 16 * 4)
    seen: list[int] = []
    monkeypatch.setattr(torch, "mm", lambda a, b, out: seen.append(a.data_ptr()))
    multiply = gemm._product(shape, "fp32", CPU)
    for _ in range(8):
        multiply()
    assert len(set(seen)) == 4
    assert seen[:4] == seen[4:]


def test_what_a_device_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on newer devices\nat some line of C++")

    once(monkeypatch)
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    before = torch.get_float32_matmul_precision()
    formats = ["tf32", "fp8_fast", "fp8", "fp32"]
    found = list(gemm.rates([Shape(16, 16, 16)], formats, CPU, repeats=2, seconds=0.0))
    assert [each.refusal for each in found] == [
        "a format of GPUs", "a format of GPUs", "torch._scaled_mm is only supported on newer devices", "",
    ]  # fmt: skip
    assert [each.rate is None for each in found] == [True, True, True, False]
    assert "fp8                  n/a: torch._scaled_mm is only" in gemm.table(found, CPU)
    assert gemm.best(found, ["fp8"]) is None
    assert torch.get_float32_matmul_precision() == before


def test_attainable_is_the_best_of_the_models_own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(preset="gpt2-124m")
    monkeypatch.setattr(
        gemm, "_rate", lambda shape, name, *_: Spread(float(shape.n) + (name == "bf16"), 0.0, math.inf, 3)
    )
    found = gemm.attainable(model, 64, "bf16", CPU)
    assert found is not None
    assert found.flops == model.vocab_size + 1
    assert found.source == "64x768x50257 in bf16, measured"
    assert "64x768x3072 in fp8, measured" in str(gemm.attainable(model, 64, "fp8", CPU))  # the head is not in fp8
    assert gemm.attainable(model, 64, "int4", CPU) is None


def test_attainable_in_fp8_is_the_best_of_all_that_a_gpu_has_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"fp8": 2.0, "fp8_fast": 4.0, "fp8_tensorwise": 3.0, "fp8_tensorwise_fast": 5.0}
    monkeypatch.setattr(gemm, "_rate", lambda shape, name, *_: Spread(speeds[name], 0.0, math.inf, 3))
    gpu = Device(torch.device("cuda"), "nccl")
    found = gemm.attainable(ModelConfig(preset="gpt2-124m"), 64, "fp8", gpu)
    assert found is not None and (found.flops, found.source[-32:]) == (5.0, "in fp8_tensorwise_fast, measured")
    speeds["fp8"] = 6.0
    assert str(gemm.attainable(ModelConfig(preset="gpt2-124m"), 64, "fp8", gpu)).endswith("in fp8, measured')")


def test_a_share_is_of_the_makers_fp8_whichever_way_it_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "name", "NVIDIA H100 80GB HBM3")
    half = Spread(1978.9e12 / 2, 0.0, math.inf, 3)
    shown = gemm.table([Rate(Shape(8, 8, 8), name, half) for name in gemm.FP8], CPU).splitlines()[2:]
    assert [line.split()[1] for line in shown] == list(gemm.FP8)
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
        ("--sizes 8x8", "'8x8' is no product of matrices: MxKxN"),
        ("--sizes 8x0x8", "'8x0x8' is no product"),
    ],
)
def test_mistakes(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "gemm", *words.split()])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_an_unknown_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gemm", "--dtypes", "bf16", "int4"]) == 2
    assert "--dtypes: there is no format 'int4'  -> of fp64, fp32, tf32, bf16, fp8, fp8_fast" in capsys.readouterr().err


def test_what_cannot_be_measured_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in (
        (["--sizes", "8x8x8", "--dtypes", "fp8_fast"], "a format of GPUs"),
        (["--sizes", "99999999x9999999x8", "--dtypes", "bf16"], "does not fit the device's memory"),
    ):
        assert main(["bench", "gemm", *words]) == 1
        shown = capsys.readouterr()
        assert f"n/a: {reason}" in shown.out
        assert f"nothing could be measured: {reason}  -> other --sizes or --dtypes" in shown.err
