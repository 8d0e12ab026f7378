"""The first backend that can serve is chosen, or the one that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megascale.catalog.backends import BACKENDS
from megascale.config.backends import BackendsConfig
from megascale.config.model import ModelConfig
from megascale.core.errors import MegascaleError
from megascale.core.registry import Card, Registry
from megascale.device import detect
from megascale.ops.select import Choice, Reluctance, Setting, build, select
from tests.runs import GPT


class Absent:
    def refusal(self, setting: Setting) -> str | None:
        return "is not installed"

    def build(self, setting: Setting) -> Callable[..., Any]:
        raise AssertionError("it has refused")


class Present:
    def refusal(self, setting: Setting) -> str | None:
        return None if setting.dtype == torch.float32 else "needs fp32"

    def build(self, setting: Setting) -> Callable[..., Any]:
        return lambda: "present"


class Reluctant:
    def refusal(self, setting: Setting) -> str | None:
        return Reluctance("would rather not")

    def build(self, setting: Setting) -> Callable[..., Any]:
        return lambda: "reluctant"


class Last:
    def refusal(self, setting: Setting) -> str | None:
        return None

    def build(self, setting: Setting) -> Callable[..., Any]:
        return lambda: "last"


def choose_among(monkeypatch: pytest.MonkeyPatch, **classes: type) -> None:
    cards = [Card(name, "", f"tests.ops.test_select:{body.__name__}") for name, body in classes.items()]
    monkeypatch.setitem(BACKENDS, "norm", Registry("norm backend", "none", cards))


@pytest.fixture(autouse=True)
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_among(monkeypatch, absent=Absent, present=Present, last=Last)


def setting(asked: str = "auto", dtype: torch.dtype = torch.float32, compiled: bool = False) -> Setting:
    backends = BackendsConfig.model_construct(norm=asked)
    return Setting(ModelConfig.model_validate(GPT), backends, dtype, detect(allow_gpu=False), compiled=compiled)


def test_the_first_that_can_serve_is_chosen() -> None:
    assert select("norm", setting()) == Choice("norm", "present", {"absent": "is not installed"})
    assert build("norm", setting())() == "present"


def test_one_that_cannot_serve_is_passed_over_with_its_reason() -> None:
    refusals = {"absent": "is not installed", "present": "needs fp32"}
    assert select("norm", setting(dtype=torch.bfloat16)) == Choice("norm", "last", refusals)
    assert build("norm", setting(dtype=torch.bfloat16))() == "last"


def test_the_one_that_is_asked_for_is_taken() -> None:
    assert select("norm", setting("last")) == Choice("norm", "last", {})


def test_one_that_is_asked_for_and_cannot_serve_is_an_error() -> None:
    with pytest.raises(MegascaleError, match=r"backends\.norm = 'present' cannot serve: present: needs fp32") as caught:
        select("norm", setting("present", torch.bfloat16))
    assert caught.value.mend == "backends.norm=auto"
    assert caught.value.exit_status == 2  # the user's to mend


def test_where_none_can_serve_what_is_left_open_the_mend_is_no_key_of_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_among(monkeypatch, absent=Absent)
    with pytest.raises(MegascaleError, match="absent: is not installed") as caught:
        select("norm", setting())
    assert caught.value.mend == "another device, or train.precision=bf16"


def test_one_that_would_rather_not_serves_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_among(monkeypatch, reluctant=Reluctant, last=Last)
    assert select("norm", setting()) == Choice("norm", "last", {"reluctant": "would rather not"})
    assert select("norm", setting("reluctant")) == Choice("norm", "reluctant", {})


def test_in_a_compiled_block_what_is_left_open_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_among(monkeypatch, last=Last, compile=Reluctant)
    assert select("norm", setting(compiled=True)).backend == "compile"
    assert select("norm", setting("last", compiled=True)).backend == "last"
    choose_among(monkeypatch, last=Last, compile=Absent)
    with pytest.raises(MegascaleError, match="compile: is not installed") as caught:
        select("norm", setting(compiled=True))
    assert caught.value.mend == "train.compile=false"
    choose_among(monkeypatch, last=Last)
    assert select("norm", setting(compiled=True)).backend == "last"
