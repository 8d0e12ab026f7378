"""Calls of Transformer Engine's kernels, checked by a stand-in with the signatures of versions 2.1 to 2.20 and the
kernels' formulas. `megascale doctor` tests the kernels themselves on a GPU.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.backends import BACKENDS
from megascale.ops.selftest import difference
from tests.ops.settings import setting


def norm_forward(input: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centre: bool) -> tuple[Tensor, ...]:
    assert input.dim() == 2 and input.is_contiguous()
    mean = input.mean(-1) if centre else torch.zeros(len(input), dtype=input.dtype)
    scale = torch.rsqrt((input - mean[:, None]).square().mean(-1) + eps)
    out = (input - mean[:, None]) * scale[:, None] * weight
    return (out if bias is None else out + bias), mean.float(), scale.float()


def norm_backward(
    dz: Tensor, x: Tensor, mean: Tensor, scale: Tensor, gamma: Tensor, centre: bool
) -> tuple[Tensor, ...]:
    assert dz.dim() == x.dim() == 2 and dz.is_contiguous() and x.is_contiguous()
    unit, wide = (x - mean[:, None]) * scale[:, None], dz * gamma
    inner = wide - unit * (wide * unit).mean(-1, keepdim=True)
    if centre:
        inner = inner - wide.mean(-1, keepdim=True)
    return inner * scale[:, None], (dz * unit).sum(0), dz.sum(0)


class Kernels(ModuleType):
    """Stand in for transformer_engine_torch, with the argument names of its bindings."""

    def rmsnorm_fwd(
        self, input: Tensor, weight: Tensor, eps: float, ln_out: None, quantizer: None, otype: str, sm_margin: int,
        zero_centered_gamma: bool,
    ) -> list[Any]:  # fmt: skip
        assert (ln_out, quantizer, otype, sm_margin) == (None, None, "fp32", 0)
        out, _, scale = norm_forward(input, weight + zero_centered_gamma, None, eps, centre=False)
        return [out, None, scale]

    def rmsnorm_bwd(
        self, dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
    ) -> list[Tensor]:
        assert sm_margin == 0
        gain = gamma + zero_centered_gamma
        return list(norm_backward(dz, x, torch.zeros_like(rsigma), rsigma, gain, centre=False)[:2])

    def layernorm_fwd(
        self, input: Tensor, weight: Tensor, bias: Tensor, eps: float, ln_out: None, quantizer: None, otype: str,
        sm_margin: int, zero_centered_gamma: bool,
    ) -> list[Tensor]:  # fmt: skip
        assert (ln_out, quantizer, otype, sm_margin, zero_centered_gamma) == (None, None, "fp32", 0, False)
        return list(norm_forward(input, weight, bias, eps, centre=True))

    def layernorm_bwd(
        self, dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int,
        zero_centered_gamma: bool,
    ) -> list[Tensor]:  # fmt: skip
        assert (sm_margin, zero_centered_gamma) == (0, False)
        return list(norm_backward(dz, x, mu, rsigma, gamma, centre=True))

    def swiglu(self, input: Tensor, quantizer: None) -> Tensor:
        assert quantizer is None
        gate, up = input.chunk(2, -1)
        return F.silu(gate) * up

    def dswiglu(self, grad: Tensor, fwd_input: Tensor, quantizer: None) -> Tensor:
        return torch.func.vjp(lambda x: self.swiglu(x, None), fwd_input)[1](grad)[0]

    def geglu(self, input: Tensor, quantizer: None) -> Tensor:
        assert quantizer is None
        gate, up = input.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def dgeglu(self, grad: Tensor, fwd_input: Tensor, quantizer: None) -> Tensor:
        return torch.func.vjp(lambda x: self.geglu(x, None), fwd_input)[1](grad)[0]

    def gelu(self, input: Tensor, quantizer: None) -> Tensor:
        assert quantizer is None
        return F.gelu(input, approximate="tanh")

    def dgelu(self, grad: Tensor, fwd_input: Tensor, quantizer: None) -> Tensor:
        return torch.func.vjp(lambda x: self.gelu(x, None), fwd_input)[1](grad)[0]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = ModuleType("transformer_engine.pytorch.constants")
    constants.TE_DType = {torch.float32: "fp32"}
    modules = {
        "transformer_engine": ModuleType("transformer_engine"),
        "transformer_engine.pytorch": ModuleType("transformer_engine.pytorch"),
        "transformer_engine.pytorch.constants": constants,
        "transformer_engine_torch": Kernels("transformer_engine_torch"),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("norm", "rmsnorm"),
        ("norm", "rmsnorm_1p"),
        ("norm", "layernorm"),
        ("activation", "swiglu"),
        ("activation", "geglu"),
        ("activation", "gelu_tanh"),
    ],
)
def test_results_and_gradients_equal_the_fp64_reference(operation: str, name: str) -> None:
    assert difference(operation, "te", setting(**{operation: name})) < 1e-5


def test_every_supported_variant_is_tested() -> None:
    variants = {name for op in ("norm", "activation") for name in BACKENDS[op]["te"].facts["variants"]}
    assert variants == {"rmsnorm", "rmsnorm_1p", "layernorm", "swiglu", "geglu", "gelu_tanh"}
