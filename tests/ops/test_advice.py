"""Hints about slow backends on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import _registry

from megascale.config.backends import BackendsConfig
from megascale.device import Device
from megascale.ops import wgrad
from megascale.ops.advice import slow_backend_hint
from megascale.ops.core_attention import TorchAttention, newer_flash
from megascale.ops.flash_partial import TorchVarlen
from megascale.ops.library import Library
from megascale.ops.select import OpContext
from tests.ops.settings import CPU, GPU, setting

Machine = Callable[..., OpContext]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a function for the context of a small bf16 Llama on a GPU with given libraries and C compiler."""

    def has(
        *libraries: str, compiler: str = sys.executable, kernel: str = "CUDNN_ATTENTION", fp32_gemm: bool = True
    ) -> OpContext:
        def gemm_into_fp32(device: torch.device) -> None:
            if not fp32_gemm:
                raise RuntimeError("no such overload")

        missing_reason = lambda library: None if library.package in libraries else f"{library.package} is not installed"  # noqa: E731
        monkeypatch.setattr(Library, "missing_reason", missing_reason)
        monkeypatch.setattr(wgrad, "_probe", gemm_into_fp32)
        monkeypatch.setenv("CC", compiler)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(Device, "attention_kernel", lambda self, number_format, head_dim, shared: kernel)
        return setting(torch.bfloat16, GPU)

    return has


def test_a_compiler_suffices(machine: Machine) -> None:
    assert slow_backend_hint(machine("triton")) is None


def test_operations_by_torchs_operators_are_named(machine: Machine) -> None:
    hint = slow_backend_hint(machine("triton", compiler="no-such-compiler"))
    assert hint == (
        "rope, norm, add_norm, activation, cross_entropy, optimizer: slower than possible on this GPU; "
        "missing, any of: compile: no C compiler: there is no no-such-compiler; "
        "te: transformer_engine is not installed; liger: liger_kernel is not installed; apex: apex is not installed; "
        "triton: no C compiler: there is no no-such-compiler"
    )


def test_only_slow_operations_are_named(machine: Machine) -> None:
    llama = machine("liger_kernel", compiler="no-such-compiler")
    assert str(slow_backend_hint(llama)).startswith("rope, cross_entropy, optimizer: slower")
    gpt = {"norm": "layernorm", "activation": "gelu", "position": "learned"}
    plain = setting(torch.bfloat16, GPU, **gpt)
    assert str(slow_backend_hint(plain)).startswith("add_norm, cross_entropy, optimizer: slower"), (
        "LayerNorm and GELU are one kernel of torch's"
    )
    assert str(slow_backend_hint(setting(torch.bfloat16, GPU, **gpt, block="parallel"))).startswith(
        "cross_entropy, optimizer: slower"
    )


def test_fp8_casts_are_named_only_under_fp8(machine: Machine) -> None:
    bf16 = machine("liger_kernel", compiler="no-such-compiler")
    assert "linear" not in str(slow_backend_hint(bf16))
    assert str(slow_backend_hint(replace(bf16, recipe="rowwise"))).startswith("linear, ")


def test_unfused_gradient_accumulation_is_named(machine: Machine) -> None:
    bf16 = machine("triton", fp32_gemm=False)
    assert str(slow_backend_hint(bf16)).startswith(
        "wgrad: slower than possible on this GPU; missing, any of: addmm: torch "
    )
    assert slow_backend_hint(replace(bf16, dtype=torch.float32)) is None, "in fp32 the GEMM adds"


def test_an_outdated_attention_kernel_is_named(machine: Machine) -> None:
    assert slow_backend_hint(machine("triton", kernel="FLASH_ATTENTION")) == (
        "attention: slower than possible on this GPU; missing, any of: "
        "flash: flash_attn_3 is not installed; te: transformer_engine is not installed"
    )
    assert slow_backend_hint(machine("triton", "flash_attn_3", kernel="FLASH_ATTENTION")) is None


def test_newer_kernels_in_torch_are_not_outdated(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 on Blackwell, for head dims that it has."""
    blackwell = lambda *libraries: machine("triton", *libraries, kernel="FLASH_ATTENTION")  # noqa: E731
    context = replace(blackwell(), model=setting(hidden_size=256, num_heads=4, num_kv_heads=4).model)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "flash: flash_attn_4 is not installed" in str(slow_backend_hint(context))
    blackwell("flash_attn_4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert newer_flash(context) == "FA4" and slow_backend_hint(context) is None
    assert newer_flash(setting(torch.bfloat16, GPU)) is None, "a head dim of 8"


@pytest.mark.parametrize("backend", [TorchAttention(), TorchVarlen()], ids=lambda each: type(each).__name__)
def test_torchs_attention_takes_the_newer_kernels(machine: Machine, backend: TorchAttention | TorchVarlen) -> None:
    attention, registered = torch.nn.attention, []
    context = machine("flash_attn_3", "flash_attn_4", kernel="FLASH_ATTENTION")
    own = dict(_registry._FLASH_ATTENTION_IMPLS)
    try:
        for name in own:
            attention.register_flash_attention_impl(name, register_fn=partial(registered.append, name))
        backend.build(setting(torch.bfloat16, CPU))
        assert not registered
        backend.build(context)
        assert registered == ["FA3"]
        torch.use_deterministic_algorithms(True)
        assert newer_flash(context) is None
    finally:
        torch.use_deterministic_algorithms(False)
        for name, function in own.items():
            attention.register_flash_attention_impl(name, register_fn=function)


def test_requested_backends_are_not_named(machine: Machine) -> None:
    requested = ("rope", "norm", "add_norm", "activation", "cross_entropy", "optimizer")
    hint = slow_backend_hint(replace(machine(), backends=BackendsConfig(**dict.fromkeys(requested, "torch"))))
    assert hint is None


def test_no_hint_without_a_faster_library(machine: Machine) -> None:
    wide = replace(machine("triton", kernel="EFFICIENT_ATTENTION"), dtype=torch.float32)
    assert slow_backend_hint(wide) is None, "no library has attention in fp32"


def test_no_hint_on_a_cpu() -> None:
    assert slow_backend_hint(setting(device=CPU)) is None
