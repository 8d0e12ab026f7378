"""The self-test passes correct backends, and fails wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.backends import BACKENDS
from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.recipes import RECIPES
from megascale.config.loading import load_config
from megascale.core.registry import Card, Registry
from megascale.ops.core_attention import AttentionMask
from megascale.ops.fp8 import Fp8Kernels, TorchFp8, scaled_matmul
from megascale.ops.norm import rms_norm
from megascale.ops.optimizer import TorchOptimizer, Update, UpdateInput
from megascale.ops.quantized import Quantized
from megascale.ops.select import NotByDefault, OpContext
from megascale.ops.selftest import CASES, TOLERANCES, BackendReport, check_backends, difference, is_comparable
from megascale.optim.adamw import AdamW
from megascale.train.op_context import op_context
from tests.ops.settings import CPU, setting

CONFIGS = sorted((Path(__file__).parents[2] / "configs/bench").glob("*-*.toml"))


class Backend:
    """A supported backend of the norm."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return None

    def build(self, context: OpContext) -> Callable[..., Any]:
        return self.norm

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return rms_norm(x, weight, bias, eps)


class Torch(Backend):
    pass


class WrongResult(Backend):
    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return rms_norm(x, weight, bias, eps) * 1.001


class WrongGradient(Backend):
    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return rms_norm(x, weight, bias, eps) + (weight - weight.detach()) / 8


class Raises(Backend):
    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        raise RuntimeError("an illegal memory access\nand more")


class Nan(Backend):
    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return rms_norm(x, weight, bias, eps) * float("nan")


class NanGradient(Backend):
    """A right result with a wrong gradient."""

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        weight.register_hook(lambda gradient: gradient * float("nan"))
        return rms_norm(x, weight, bias, eps)


class Unsupported(Backend):
    def unsupported_reason(self, context: OpContext) -> str | None:
        return "needs a GPU"

    def build(self, context: OpContext) -> Callable[..., Any]:
        raise AssertionError("an unsupported backend is not built")


class Slow(Backend):
    def unsupported_reason(self, context: OpContext) -> str | None:
        return NotByDefault("is slower")


def transposed_matmul(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    return scaled_matmul(b, a, dtype).reshape(a.shape[0], b.shape[0])


class WrongGemm(TorchFp8):
    """A column-major result read as row-major."""

    def build(self, context: OpContext) -> Fp8Kernels:
        return Fp8Kernels(scaled_matmul=transposed_matmul)


def verdict_of(body: type, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> BackendReport:
    cards = [Card(name, "", f"tests.ops.test_selftest:{of.__name__}") for name, of in (("it", body), ("torch", Torch))]
    monkeypatch.setitem(BACKENDS, "norm", Registry("norm backend", "none", cards))
    return check_backends("norm", setting(dtype)).verdicts[0]


def test_a_correct_backend_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_of(Backend, monkeypatch)
    assert verdict.chosen and verdict.supported and not verdict.failed
    assert verdict.difference is not None and 0 < verdict.difference < 1e-5


@pytest.mark.parametrize("body", [WrongResult, WrongGradient])
def test_a_wrong_backend_fails(body: type, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_of(body, monkeypatch)
    assert verdict.failed
    assert verdict.difference is not None and verdict.difference > TOLERANCES[torch.float32]


def test_an_error_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_of(Raises, monkeypatch)
    assert verdict.failed
    assert verdict.error == "RuntimeError: an illegal memory access"


@pytest.mark.parametrize("body", [Nan, NanGradient])
def test_nan_fails(body: type, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict_of(body, monkeypatch).error == "gives NaN"


def test_an_unsupported_backend_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_of(Unsupported, monkeypatch)
    assert not (verdict.supported or verdict.chosen or verdict.failed)
    assert verdict.reason == "needs a GPU"


def test_a_backend_skipped_by_auto_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_of(Slow, monkeypatch)
    assert verdict.supported and not verdict.chosen
    assert verdict.difference is not None


@pytest.mark.parametrize("operation", CASES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("model", [{}, {"norm": "layernorm", "activation": "gelu", "num_kv_heads": 4}], ids=str)
def test_torch_passes(operation: str, dtype: torch.dtype, model: dict[str, Any]) -> None:
    worst = difference(operation, "torch", setting(dtype, tp=2, **model))
    assert (worst == 0) == (dtype == torch.float64 or operation == "linear")  # a cast rounds equal numbers alike
    assert worst < TOLERANCES[dtype] / 2


@pytest.mark.parametrize(
    "model",
    [
        {"num_heads": 16, "num_kv_heads": 16, "hidden_size": 256},
        {"window": 1},
        {"window": 3, "num_kv_heads": 4},
        {"sparse_attention": {"local_blocks": 1, "stride": 2, "block": 32}, "seq_length": 300},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_torchs_attention_passes_in_other_models(dtype: torch.dtype, model: dict[str, Any]) -> None:
    assert difference("attention", "torch", setting(dtype, **model)) < TOLERANCES[dtype] / 2


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_torchs_attention_passes_in_large_models(path: Path) -> None:
    given = replace(op_context(load_config(str(path)), CPU), dtype=torch.bfloat16)
    assert difference("attention", "torch", given) < TOLERANCES[torch.bfloat16] / 2


@pytest.mark.parametrize(("window", "seen"), [(4096, (384, 128)), (100, (384, 100)), (0, (128, None))])
def test_attention_is_tested_in_a_window_shorter_than_the_sequence(window: int, seen: tuple[int, int | None]) -> None:
    context, calls = setting(seq_length=8192, window=window), []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        calls.append((q.shape[2], mask.window))
        return q + k.sum() + v.sum()

    CASES["attention"].results(attend, context, CASES["attention"].inputs(context))
    assert calls == [seen]


def test_zero_tensors_have_no_relative_difference() -> None:
    assert difference("cross_entropy", "torch", setting(vocab_size=1)) == 0


@pytest.mark.parametrize("operation", CASES)
def test_inputs_differ(operation: str) -> None:
    inputs = CASES[operation].inputs(setting(num_kv_heads=4, norm="layernorm"))
    assert len({float(tensor.flatten()[0]) for tensor in inputs}) == len(inputs)


def fp8_context(recipe: str, dtype: torch.dtype = torch.bfloat16) -> OpContext:
    return replace(setting(dtype, hidden_size=256), recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_gemms_are_tested(recipe: str, dtype: torch.dtype) -> None:
    assert 0 < difference("linear", "torch", fp8_context(recipe, dtype)) < TOLERANCES[dtype] / 5


def test_a_wrong_fp8_gemm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {"it": "tests.ops.test_selftest:WrongGemm", "torch": "megascale.ops.fp8:TorchFp8"}
    cards = [Card(name, "", body) for name, body in bodies.items()]
    monkeypatch.setitem(BACKENDS, "linear", Registry("linear backend", "none", cards))
    wrong, right = check_backends("linear", fp8_context("tensorwise")).verdicts
    assert wrong.failed and wrong.difference is not None and not right.failed


class WrongRule(AdamW):
    """A rule that ignores the step count."""

    def step(self, lr: float, step: int, factor: Tensor, skip: Tensor) -> None:
        super().step(lr, 1, factor, skip)


class WrongOptimizer(TorchOptimizer):
    def build(self, context: OpContext) -> type[Any]:
        return WrongRule


def test_a_wrong_optimizer_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {"it": "tests.ops.test_selftest:WrongOptimizer", "torch": "megascale.ops.optimizer:TorchOptimizer"}
    cards = [Card(name, "", body) for name, body in bodies.items()]
    monkeypatch.setitem(BACKENDS, "optimizer", Registry("optimizer backend", "none", cards))
    wrong, right = check_backends("optimizer", setting()).verdicts
    assert wrong.failed and wrong.difference is not None and not right.failed


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS.names() if is_comparable(name)])
def test_every_optimizer_is_tested(name: str) -> None:
    found = difference("optimizer", "torch", replace(setting(), optimizer=name))
    assert 0 < found < 1e-5 or (name == "lion" and not found), "Lion's directions are signs"


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS.names() if not is_comparable(name)])
def test_rules_whose_bases_rounding_decides_have_no_verdict(name: str) -> None:
    (*_, torch_backend) = check_backends("optimizer", replace(setting(), optimizer=name)).verdicts
    assert (torch_backend.chosen, torch_backend.difference, torch_backend.error) == (True, None, None)


def test_a_wrong_rule_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OPTIMIZERS["muon"].load()

    def wrong(given: UpdateInput) -> Update:
        direction, state = right(given)
        return direction * (1.01 if given.grad.dtype == torch.float32 else 1.0), state

    monkeypatch.setattr("megascale.optim.muon.muon", wrong)
    assert check_backends("optimizer", replace(setting(), optimizer="muon")).verdicts[-1].failed


def test_every_operation_has_a_test() -> None:
    assert CASES.keys() == BACKENDS.keys()
