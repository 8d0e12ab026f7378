"""Selection of a backend: the first supported, or the requested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megascale.catalog.backends import BACKENDS
from megascale.config.backends import BackendsConfig
from megascale.config.model import ModelConfig
from megascale.core.errors import MegascaleError
from megascale.core.registry import Card, Registry
from megascale.device import detect_device
from megascale.ops.select import BackendChoice, NotByDefault, OpContext, build_op, select_backend
from tests.runs import GPT


class Absent:
    def unsupported_reason(self, context: OpContext) -> str | None:
        return "is not installed"

    def build(self, context: OpContext) -> Callable[..., Any]:
        raise AssertionError("an unsupported backend is not built")


class Present:
    def unsupported_reason(self, context: OpContext) -> str | None:
        return None if context.dtype == torch.float32 else "needs fp32"

    def build(self, context: OpContext) -> Callable[..., Any]:
        return lambda: "present"


class Slow:
    def unsupported_reason(self, context: OpContext) -> str | None:
        return NotByDefault("is slower")

    def build(self, context: OpContext) -> Callable[..., Any]:
        return lambda: "slow"


class Last:
    def unsupported_reason(self, context: OpContext) -> str | None:
        return None

    def build(self, context: OpContext) -> Callable[..., Any]:
        return lambda: "last"


def register_cards(monkeypatch: pytest.MonkeyPatch, **classes: type) -> None:
    cards = [Card(name, "", f"tests.ops.test_select:{body.__name__}") for name, body in classes.items()]
    monkeypatch.setitem(BACKENDS, "norm", Registry("norm backend", "none", cards))


@pytest.fixture(autouse=True)
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    register_cards(monkeypatch, absent=Absent, present=Present, last=Last)


def setting(requested: str = "auto", dtype: torch.dtype = torch.float32, compiled: bool = False) -> OpContext:
    backends = BackendsConfig.model_construct(norm=requested)
    return OpContext(
        ModelConfig.model_validate(GPT), backends, dtype, detect_device(allow_gpu=False), compiled=compiled
    )


def test_auto_selects_the_first_supported_backend() -> None:
    assert select_backend("norm", setting()) == BackendChoice("norm", "present", {"absent": "is not installed"})
    assert build_op("norm", setting())() == "present"


@pytest.mark.parametrize(("recipe", "backend"), [("tensorwise", "last"), ("delayed", "present"), (None, "present")])
def test_a_norm_that_finds_the_amax_of_casts_comes_first(
    recipe: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS["norm"]["last"].facts, "finds_amax", True)
    assert select_backend("norm", replace(setting(), recipe=recipe)).backend == backend
    requested = replace(setting("present"), recipe=recipe)
    assert select_backend("norm", requested).backend == "present"


def test_an_unsupported_backend_is_skipped_with_its_reason() -> None:
    rejected = {"absent": "is not installed", "present": "needs fp32"}
    assert select_backend("norm", setting(dtype=torch.bfloat16)) == BackendChoice("norm", "last", rejected)
    assert build_op("norm", setting(dtype=torch.bfloat16))() == "last"


def test_a_requested_backend_is_selected() -> None:
    assert select_backend("norm", setting("last")) == BackendChoice("norm", "last", {})


def test_a_requested_unsupported_backend_is_an_error() -> None:
    with pytest.raises(MegascaleError, match=r"backends\.norm = 'present' cannot serve: present: needs fp32") as caught:
        select_backend("norm", setting("present", torch.bfloat16))
    assert caught.value.hint == "backends.norm=auto"
    assert caught.value.exit_status == 2  # the user's mistake


def test_without_a_supported_backend_under_auto_the_hint_names_no_key_of_backends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register_cards(monkeypatch, absent=Absent)
    with pytest.raises(MegascaleError, match="absent: is not installed") as caught:
        select_backend("norm", setting())
    assert caught.value.hint == "another device, or train.precision=bf16"


def test_a_backend_skipped_by_auto_is_selected_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    register_cards(monkeypatch, slow=Slow, last=Last)
    assert select_backend("norm", setting()) == BackendChoice("norm", "last", {"slow": "is slower"})
    assert select_backend("norm", setting("slow")) == BackendChoice("norm", "slow", {})


@pytest.mark.parametrize(
    ("fact", "needs", "reason"),
    [
        ("logit_softcap", {"model": {"logit_softcap": 30.0}}, "has no soft cap of logits"),
        ("document_mask", {"document_mask": True}, "has no positions that restart within a row"),
        ("dropout", {"model": {"dropout": 0.1}}, "draws dropout of its own, which would depend on the layout"),
    ],
)
def test_a_card_says_what_its_backend_lacks(
    fact: str, needs: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [
        Card("lacking", "", "tests.ops.test_select:Last", {fact: False}),
        Card("last", "", "tests.ops.test_select:Last"),
    ]
    monkeypatch.setitem(BACKENDS, "norm", Registry("norm backend", "none", cards))
    model = ModelConfig.model_validate(GPT | needs.get("model", {}))
    needing = replace(setting(), **needs | {"model": model})
    assert select_backend("norm", setting()).backend == "lacking"
    assert select_backend("norm", needing).rejected == {"lacking": reason}


def test_in_a_compiled_block_auto_means_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    register_cards(monkeypatch, last=Last, compile=Slow)
    assert select_backend("norm", setting(compiled=True)).backend == "compile"
    assert select_backend("norm", setting("last", compiled=True)).backend == "last"
    register_cards(monkeypatch, last=Last, compile=Absent)
    with pytest.raises(MegascaleError, match="compile: is not installed") as caught:
        select_backend("norm", setting(compiled=True))
    assert caught.value.hint == "train.compile=false"
    register_cards(monkeypatch, last=Last)
    assert select_backend("norm", setting(compiled=True)).backend == "last"
