"""The self-test passes what computes the operation, and nothing else."""

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
from megascale.config.explain import load
from megascale.core.registry import Card, Registry
from megascale.ops.fp8 import Kernels, Quantized, TorchLinear, product
from megascale.ops.norm import rms_norm
from megascale.ops.optimizer import TorchOptimizer
from megascale.ops.select import Reluctance, Setting
from megascale.ops.selftest import CASES, TOLERANCES, Verdict, difference, examine
from megascale.optim.adamw import AdamW
from tests.ops.settings import CPU, setting

CONFIGS = sorted((Path(__file__).parents[2] / "configs/bench").glob("*-*.toml"))


class Backend:
    """Serves the norm, in some way."""

    def refusal(self, setting: Setting) -> str | None:
        return None

    def build(self, setting: Setting) -> Callable[..., Any]:
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
    """Its result is right."""

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        weight.register_hook(lambda gradient: gradient * float("nan"))
        return rms_norm(x, weight, bias, eps)


class Refuses(Backend):
    def refusal(self, setting: Setting) -> str | None:
        return "needs a GPU"

    def build(self, setting: Setting) -> Callable[..., Any]:
        raise AssertionError("it has refused")


class Reluctant(Backend):
    def refusal(self, setting: Setting) -> str | None:
        return Reluctance("would rather not")


def transposed(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    return product(b, a, dtype).reshape(a.shape[0], b.shape[0])


class WrongProduct(TorchLinear):
    """A result in columns taken for one in rows."""

    def build(self, setting: Setting) -> Kernels:
        return Kernels(product=transposed)


def verdict_of(body: type, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> Verdict:
    cards = [Card(name, "", f"tests.ops.test_selftest:{of.__name__}") for name, of in (("it", body), ("torch", Torch))]
    monkeypatch.setitem(BACKENDS, "norm", Registry("norm backend", "none", cards))
    return examine("norm", setting(dtype)).verdicts[0]


def test_what_is_right_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_of(Backend, monkeypatch)
    assert verdict.chosen and verdict.willing and not verdict.failed
    assert verdict.difference is not None and 0 < verdict.difference < 1e-5


@pytest.mark.parametrize("body", [WrongResult, WrongGradient])
def test_what_is_wrong_fails(body: type, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_of(body, monkeypatch)
    assert verdict.failed
    assert verdict.difference is not None and verdict.difference > TOLERANCES[torch.float32]


def test_what_raises_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_of(Raises, monkeypatch)
    assert verdict.failed
    assert verdict.error == "RuntimeError: an illegal memory access"


@pytest.mark.parametrize("body", [Nan, NanGradient])
def test_nan_fails(body: type, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict_of(body, monkeypatch).error == "gives NaN"


def test_what_refuses_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_of(Refuses, monkeypatch)
    assert not (verdict.willing or verdict.chosen or verdict.failed)
    assert verdict.refusal == "needs a GPU"


def test_what_would_rather_not_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_of(Reluctant, monkeypatch)
    assert verdict.willing and not verdict.chosen
    assert verdict.difference is not None


@pytest.mark.parametrize("operation", CASES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("model", [{}, {"norm": "layernorm", "activation": "gelu", "num_kv_heads": 4}], ids=str)
def test_torch_passes(operation: str, dtype: torch.dtype, model: dict[str, Any]) -> None:
    found = difference(operation, "torch", setting(dtype, tp=2, **model))
    assert (found == 0) == (dtype == torch.float64 or operation == "linear")  # a cast rounds equal numbers alike
    assert found < TOLERANCES[dtype] / 2


@pytest.mark.parametrize(
    "model",
    [{"num_heads": 16, "num_kv_heads": 16, "hidden_size": 256}, {"window": 1}, {"window": 3, "num_kv_heads": 4}],
    ids=str,
)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_torchs_attention_passes_in_other_models(dtype: torch.dtype, model: dict[str, Any]) -> None:
    assert difference("attention", "torch", setting(dtype, **model)) < TOLERANCES[dtype] / 2


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_torchs_attention_passes_in_large_models(path: Path) -> None:
    given = replace(Setting.of(load(str(path)), CPU), dtype=torch.bfloat16)
    assert difference("attention", "torch", given) < TOLERANCES[torch.bfloat16] / 2


@pytest.mark.parametrize(("window", "seen"), [(4096, (384, 128)), (100, (384, 100)), (0, (128, None))])
def test_attention_is_tested_in_a_window_that_leaves_tokens_out(window: int, seen: tuple[int, int | None]) -> None:
    given, asked = setting(seq_length=8192, window=window), []

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, *_: Any) -> Tensor:
        asked.append((q.shape[2], window))
        return q + k.sum() + v.sum()

    CASES["attention"].results(attend, given, CASES["attention"].numbers(given))
    assert asked == [seen]


def test_what_is_zero_has_no_relative_difference() -> None:
    assert difference("cross_entropy", "torch", setting(vocab_size=1)) == 0


@pytest.mark.parametrize("operation", CASES)
def test_no_two_inputs_are_alike(operation: str) -> None:
    found = CASES[operation].numbers(setting(num_kv_heads=4, norm="layernorm"))
    assert len({float(tensor.flatten()[0]) for tensor in found}) == len(found)


def eight_bit(recipe: str, dtype: torch.dtype = torch.bfloat16) -> Setting:
    return replace(setting(dtype, hidden_size=256), recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_in_eight_bits_are_tested(recipe: str, dtype: torch.dtype) -> None:
    assert 0 < difference("linear", "torch", eight_bit(recipe, dtype)) < TOLERANCES[dtype] / 5


def test_a_wrong_product_in_eight_bits_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {"it": "tests.ops.test_selftest:WrongProduct", "torch": "megascale.ops.fp8:TorchLinear"}
    cards = [Card(name, "", body) for name, body in bodies.items()]
    monkeypatch.setitem(BACKENDS, "linear", Registry("linear backend", "none", cards))
    wrong, right = examine("linear", eight_bit("tensorwise")).verdicts
    assert wrong.failed and wrong.difference is not None and not right.failed


class WrongRule(AdamW):
    """Knows nothing of the steps before."""

    def step(self, lr: float, step: int, factor: Tensor, skip: Tensor) -> None:
        super().step(lr, 1, factor, skip)


class WrongOptimizer(TorchOptimizer):
    def build(self, setting: Setting) -> type[Any]:
        return WrongRule


def test_a_wrong_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {"it": "tests.ops.test_selftest:WrongOptimizer", "torch": "megascale.ops.optimizer:TorchOptimizer"}
    cards = [Card(name, "", body) for name, body in bodies.items()]
    monkeypatch.setitem(BACKENDS, "optimizer", Registry("optimizer backend", "none", cards))
    wrong, right = examine("optimizer", setting()).verdicts
    assert wrong.failed and wrong.difference is not None and not right.failed


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_every_optimizer_is_tested(name: str) -> None:
    assert 0 < difference("optimizer", "torch", replace(setting(), optimizer=name)) < 1e-5


def test_every_operation_has_a_test() -> None:
    assert CASES.keys() == BACKENDS.keys()
