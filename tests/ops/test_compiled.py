"""Formulas for torch.compile, and what it needs. What it compiles is tried in the slow tests: it takes its time."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial, wraps

import pytest
import torch

from megascale.catalog.backends import BACKENDS
from megascale.config.backends import BackendsConfig
from megascale.ops import compiled
from megascale.ops.compiled import fusing, refusal
from megascale.ops.fp8 import Grain
from megascale.ops.select import BackendError, Reluctance, build, select
from megascale.ops.selftest import TOLERANCES, difference
from tests.ops.settings import CPU, GPU, setting

CASES = [
    ("norm", "rmsnorm"), ("norm", "layernorm"), ("add_norm", "rmsnorm"), ("add_norm", "layernorm"),
    ("activation", "gelu"), ("activation", "gelu_tanh"), ("activation", "swiglu"),
]  # fmt: skip
KEYS = {"norm": "norm", "add_norm": "norm", "activation": "activation"}
"""Of `[model]`, with the name of what an operation computes."""
cases = pytest.mark.parametrize(("operation", "name"), CASES)
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@cases
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_formulas(operation: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "fused", lambda formula: formula)
    assert difference(operation, "compile", setting(dtype, **{KEYS[operation]: name})) < ROUNDING[dtype]


@pytest.mark.slow
@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled(operation: str, name: str, dtype: torch.dtype) -> None:
    asked = setting(dtype, **{KEYS[operation]: name})
    assert difference(operation, "compile", asked) < min(ROUNDING[dtype], TOLERANCES[dtype])


@pytest.mark.slow
def test_a_norm_is_compiled_into_one_graph() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    normalize = BACKENDS["norm"]["compile"].load()().build(setting())
    for rows in (4, 4, 6):
        normalize(torch.randn(rows, 32, requires_grad=True), torch.ones(32), None, 1e-5).sum().backward()
    assert counters["stats"]["unique_graphs"] == 2  # one for each shape
    assert not counters["graph_break"]


@pytest.mark.slow
def test_every_shape_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    made, compile = [], torch.compile

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        made.append(tuple(inputs[0].shape))
        return graph

    monkeypatch.setattr(torch, "compile", wraps(compile)(partial(compile, backend=counting)))
    kernels = BACKENDS["linear"]["compile"].load()().build(setting())
    shapes = [(rows, 128) for rows in range(1, 21)]
    for shape in shapes:
        kernels.amax(torch.ones(shape), Grain.ROW)
    assert made == shapes


@cases
def test_on_a_cpu_it_serves_who_asks(operation: str, name: str) -> None:
    left_open = setting(**{KEYS[operation]: name})
    assert isinstance(BACKENDS[operation]["compile"].load()().refusal(left_open), Reluctance)
    assert select(operation, left_open).backend == "torch"
    asked = replace(left_open, backends=BackendsConfig.model_validate({operation: "compile"}))
    assert select(operation, asked).backend == "compile"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(CPU) is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert refusal(CPU) == "no C++ compiler: there is no no-such-compiler"
    with pytest.raises(BackendError, match=r"train\.compile: no C\+\+ compiler") as caught:
        fusing(replace(setting(), compiled=True))
    assert caught.value.exit_status == 2


def test_without_the_headers_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/no/such/folder")
    assert refusal(CPU) == "no Python.h in /no/such/folder"


def test_on_a_gpu_it_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale.ops.library.Library.absence", lambda self: f"{self.package} is not installed")
    assert refusal(GPU) == "triton is not installed"
    monkeypatch.setattr("megascale.ops.library.Library.absence", lambda self: None)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert refusal(GPU) == "no C compiler: there is no no-such-compiler"
    monkeypatch.setenv("CC", sys.executable)
    assert refusal(GPU) is None


@pytest.mark.parametrize(("name", "alone"), [("layernorm", True), ("rmsnorm", False)])
def test_on_a_gpu_it_leaves_alone_what_is_one_kernel(name: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale.ops.library.Library.absence", lambda self: None)
    monkeypatch.setenv("CC", sys.executable)
    refused = BACKENDS["norm"]["compile"].load()().refusal(setting(device=GPU, norm=name))
    assert refused == ("torch's layernorm is one kernel already" if alone else None)


def test_a_norm_behind_a_sum_is_by_whoever_is_asked_for_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale.ops.library.Library.absence", lambda self: None)
    monkeypatch.setenv("CC", sys.executable)
    chosen = {}
    for norm in ("auto", "compile", "liger", "apex"):
        asked = replace(setting(device=GPU), backends=BackendsConfig(norm=norm))
        chosen[norm] = select("add_norm", asked).backend
    assert chosen == {"auto": "liger", "compile": "compile", "liger": "liger", "apex": "torch"}


def test_what_a_model_does_not_have_is_compiled_for_nobody() -> None:
    blocks = replace(setting(position="learned"), compiled=True)
    assert not blocks.uses("rope")
    assert select("rope", blocks).backend == "torch"
    assert select("rope", replace(setting(), compiled=True)).backend == "compile"


def test_an_eager_block_is_left_as_it_is() -> None:
    assert fusing(setting())(build) is build
