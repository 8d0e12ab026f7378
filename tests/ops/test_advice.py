"""What is said of a GPU on which something slow serves by default."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megascale.config.backends import BackendsConfig
from megascale.device import Device
from megascale.ops import wgrad
from megascale.ops.advice import advice
from megascale.ops.library import Library
from megascale.ops.select import Setting
from tests.ops.settings import CPU, GPU, setting

Machine = Callable[..., Setting]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A small Llama in bf16 on a GPU with these libraries and a C compiler, or without one."""

    def has(
        *libraries: str, compiler: str = sys.executable, kernel: str = "CUDNN_ATTENTION", wide: bool = True
    ) -> Setting:
        def gemm_into_fp32(device: torch.device) -> None:
            if not wide:
                raise RuntimeError("no such overload")

        absence = lambda library: None if library.package in libraries else f"{library.package} is not installed"  # noqa: E731
        monkeypatch.setattr(Library, "absence", absence)
        monkeypatch.setattr(wgrad, "_try", gemm_into_fp32)
        monkeypatch.setenv("CC", compiler)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(Device, "attention_kernel", lambda self, number_format, head_dim, shared: kernel)
        return setting(torch.bfloat16, GPU)

    return has


def test_a_compiler_is_enough(machine: Machine) -> None:
    assert advice(machine("triton")) is None


def test_what_falls_to_torchs_operators(machine: Machine) -> None:
    said = advice(machine("triton", compiler="no-such-compiler"))
    assert said == (
        "rope, norm, add_norm, activation, cross_entropy: slower than they need be on this GPU, for want of one of: "
        "compile: no C compiler: there is no no-such-compiler; te: transformer_engine is not installed; "
        "liger: liger_kernel is not installed; apex: apex is not installed"
    )


def test_only_what_is_slow_is_named(machine: Machine) -> None:
    llama = machine("liger_kernel", compiler="no-such-compiler")
    assert str(advice(llama)).startswith("rope, cross_entropy: slower")
    gpt = {"norm": "layernorm", "activation": "gelu", "position": "learned"}
    plain = setting(torch.bfloat16, GPU, **gpt)
    assert str(advice(plain)).startswith("add_norm, cross_entropy: slower"), (
        "LayerNorm and GELU are one kernel of torch's"
    )
    assert str(advice(setting(torch.bfloat16, GPU, **gpt, block="parallel"))).startswith("cross_entropy: slower")


def test_casts_are_slow_where_there_are_some(machine: Machine) -> None:
    bf16 = machine("liger_kernel", compiler="no-such-compiler")
    assert "linear" not in str(advice(bf16))
    assert str(advice(replace(bf16, recipe="rowwise"))).startswith("linear, ")


def test_gradients_that_are_added_by_a_pass(machine: Machine) -> None:
    bf16 = machine("triton", wide=False)
    assert str(advice(bf16)).startswith(
        "wgrad: slower than they need be on this GPU, for want of one of: addmm: torch "
    )
    assert advice(replace(bf16, dtype=torch.float32)) is None, "in fp32 the GEMM adds"


def test_an_older_kernel_of_attention(machine: Machine) -> None:
    assert advice(machine("triton", kernel="FLASH_ATTENTION")) == (
        "attention: slower than they need be on this GPU, for want of one of: "
        "flash: flash_attn_3 is not installed; te: transformer_engine is not installed"
    )
    assert advice(machine("triton", "flash_attn_3", kernel="FLASH_ATTENTION")) is None


def test_what_is_asked_for_is_let_be(machine: Machine) -> None:
    asked = ("rope", "norm", "add_norm", "activation", "cross_entropy")
    said = advice(replace(machine(), backends=BackendsConfig(**dict.fromkeys(asked, "torch"))))
    assert said is None


def test_what_nothing_would_mend_is_not_said(machine: Machine) -> None:
    wide = replace(machine("triton", kernel="EFFICIENT_ATTENTION"), dtype=torch.float32)
    assert advice(wide) is None, "no library has attention in fp32"


def test_a_cpu_has_nothing_faster() -> None:
    assert advice(setting(device=CPU)) is None
