"""Formulas for torch.compile, and its requirements. Slow tests run the compiled kernels."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megascale.catalog.backends import BACKENDS
from megascale.config.backends import BackendsConfig
from megascale.model.layer_ops import LayerOps
from megascale.ops import compiled
from megascale.ops.compiled import block_compile_fn, compile_unsupported_reason
from megascale.ops.select import BackendError, NotByDefault, build_op, select_backend
from megascale.ops.selftest import TOLERANCES, difference
from tests.ops.settings import CPU, GPU, setting

CASES = [
    ("norm", "rmsnorm"), ("norm", "rmsnorm_1p"), ("norm", "layernorm"),
    ("add_norm", "rmsnorm"), ("add_norm", "rmsnorm_1p"), ("add_norm", "layernorm"),
    ("activation", "gelu"), ("activation", "gelu_tanh"), ("activation", "swiglu"), ("activation", "geglu"),
    ("activation", "clamped_swiglu"),
]  # fmt: skip
KEYS = {"norm": "norm", "add_norm": "norm", "activation": "activation"}
"""Keys of `[model]` with the variant of an operation."""
cases = pytest.mark.parametrize(("operation", "name"), CASES)
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@cases
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_formulas_equal_the_fp64_reference(
    operation: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "compile_function", lambda formula, **how: formula)
    assert difference(operation, "compile", setting(dtype, **{KEYS[operation]: name})) < ROUNDING[dtype]


@pytest.mark.slow
@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_kernels_equal_the_fp64_reference(operation: str, name: str, dtype: torch.dtype) -> None:
    context = setting(dtype, **{KEYS[operation]: name})
    assert difference(operation, "compile", context) < min(ROUNDING[dtype], TOLERANCES[dtype])


@pytest.mark.slow
def test_a_norm_is_compiled_into_one_graph() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    normalize = BACKENDS["norm"]["compile"].load()().build(setting())
    for rows in (4, 4, 6):
        normalize(torch.randn(rows, 32, requires_grad=True), torch.ones(32), None, 1e-5).sum().backward()
    assert counters["stats"]["unique_graphs"] == 2  # one for each shape
    assert not counters["graph_break"]


@cases
def test_on_a_cpu_compile_is_selected_only_on_request(operation: str, name: str) -> None:
    auto = setting(**{KEYS[operation]: name})
    assert isinstance(BACKENDS[operation]["compile"].load()().unsupported_reason(auto), NotByDefault)
    assert select_backend(operation, auto).backend == "torch"
    requested = replace(auto, backends=BackendsConfig.model_validate({operation: "compile"}))
    assert select_backend(operation, requested).backend == "compile"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_unsupported_reason(CPU) is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compile_unsupported_reason(CPU) == "no C++ compiler: there is no no-such-compiler"
    with pytest.raises(BackendError, match=r"train\.compile: no C\+\+ compiler") as caught:
        block_compile_fn(setting().device)
    assert caught.value.exit_status == 2


def test_without_the_headers_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/no/such/folder")
    assert compile_unsupported_reason(CPU) == "no Python.h in /no/such/folder"


def test_on_a_gpu_it_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale.ops.library.Library.missing_reason", lambda self: f"{self.package} is not installed")
    assert compile_unsupported_reason(GPU) == "triton is not installed"
    monkeypatch.setattr("megascale.ops.library.Library.missing_reason", lambda self: None)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compile_unsupported_reason(GPU) == "no C compiler: there is no no-such-compiler"
    monkeypatch.setenv("CC", sys.executable)
    assert compile_unsupported_reason(GPU) is None


@pytest.mark.parametrize(("name", "single"), [("layernorm", True), ("rmsnorm", False)])
def test_on_a_gpu_auto_keeps_torchs_single_kernels(name: str, single: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale.ops.library.Library.missing_reason", lambda self: None)
    monkeypatch.setenv("CC", sys.executable)
    reason = BACKENDS["norm"]["compile"].load()().unsupported_reason(setting(device=GPU, norm=name))
    assert reason == ("torch's layernorm is one kernel already" if single else None)


def test_add_norm_follows_the_backend_requested_for_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale.ops.library.Library.missing_reason", lambda self: None)
    monkeypatch.setenv("CC", sys.executable)
    selected = {}
    for norm in ("auto", "compile", "liger", "apex"):
        context = replace(setting(device=GPU), backends=BackendsConfig(norm=norm))
        selected[norm] = select_backend("add_norm", context).backend
    assert selected == {"auto": "liger", "compile": "compile", "liger": "liger", "apex": "torch"}


def test_an_operation_absent_from_the_model_is_not_compiled() -> None:
    blocks = replace(setting(position="learned"), compiled=True)
    assert not blocks.uses("rope")
    assert select_backend("rope", blocks).backend == "torch"
    assert select_backend("rope", replace(setting(), compiled=True)).backend == "compile"


def test_an_eager_block_compiles_nothing() -> None:
    assert LayerOps.from_context(setting()).compile_fn(build_op) is build_op


def test_compiled_code_of_another_user_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps it in a folder of /tmp that any user may make first."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert str(compiled.default_cache_folder()) == default_cache_dir()
    folder = tmp_path / "torchinductor_user"
    monkeypatch.setattr(compiled, "default_cache_folder", lambda: folder)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    accepted = compile_unsupported_reason(CPU)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert compile_unsupported_reason(CPU) == accepted
    assert folder.stat().st_mode & 0o777 == 0o700
    own = folder.rename(tmp_path / "own")
    folder.symlink_to(own)
    assert "another user made" in str(compile_unsupported_reason(CPU))
    folder.unlink()
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    assert "another user made" in str(compile_unsupported_reason(CPU))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(own))
    assert compile_unsupported_reason(CPU) == accepted
