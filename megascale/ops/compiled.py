"""torch.compile: what it needs, and formulas of norms and activations that it fuses.

With train.compile it compiles a block in pieces, those that lie between the linear layers: these communicate, and add
to gradients that autograd does not see.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.layers import ACTIVATIONS, NORMS
from megascale.device import Device
from megascale.ops.activation import Activate
from megascale.ops.library import TRITON
from megascale.ops.norm import AddNormalize, Normalize, behind_sum, other_norm_asked, widened
from megascale.ops.select import BackendError, Reluctance, Setting

SHAPES = 128
"""Of what one function is compiled for, at most: torch would give up after 8, which the casts of one block exceed."""

Fuse = Callable[[Callable[..., Any]], Callable[..., Any]]


def cpp_compiler() -> str:
    """The C++ compiler that torch.compile calls for a CPU."""
    return os.environ.get("CXX", "g++")


def refusal(device: Device) -> str | None:
    """Why torch.compile cannot compile for a device; None if it can."""
    if device.is_cpu:
        if shutil.which(cpp_compiler()) is None:
            return f"no C++ compiler: there is no {cpp_compiler()}"
        headers = Path(sysconfig.get_path("include"))
        return None if (headers / "Python.h").exists() else f"no Python.h in {headers}"
    if absent := TRITON.absence():
        return absent
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    return None if any(map(shutil.which, names)) else f"no C compiler: there is no {' and no '.join(names)}"


def fusing(setting: Setting) -> Fuse:
    """What a block does with functions of several operations that stand together.

    Raises: BackendError if they are to be compiled and cannot
    """
    if not setting.compiled:
        return lambda function: function
    if reason := refusal(setting.device):
        raise BackendError(f"train.compile: {reason}", mend="install it, or train.compile=false")
    return fused


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` by torch.compile, once for each shape, and each number that it is given: a run has few, and a kernel
    for one shape is faster.
    """
    settings = torch._dynamo.config  # of the process: torch before 2.13 has no limit for one function
    settings.recompile_limit = max(settings.recompile_limit, SHAPES)
    return torch.compile(function, dynamic=False)


class CompiledNorm:
    """The formulas below, and norms that other packages register."""

    def refusal(self, setting: Setting) -> str | None:
        return refusal(setting.device) or _reluctance(setting, setting.model.norm, one_kernel=("layernorm",))

    def build(self, setting: Setting) -> Normalize:
        name = setting.model.norm
        return fused(_NORMS.get(name) or NORMS[name].load())


class CompiledAddNorm:
    """The residual sum and the norm of it, one kernel forwards."""

    def refusal(self, setting: Setting) -> str | None:
        slow = _reluctance(setting, setting.model.norm, one_kernel=())
        return refusal(setting.device) or slow or other_norm_asked(setting, "compile")

    def build(self, setting: Setting) -> AddNormalize:
        name = setting.model.norm
        return fused(behind_sum(_NORMS.get(name) or NORMS[name].load()))


class CompiledActivation:
    """The formulas below, and activations that other packages register."""

    def refusal(self, setting: Setting) -> str | None:
        name = setting.model.activation
        return refusal(setting.device) or _reluctance(setting, name, one_kernel=("gelu", "gelu_tanh"))

    def build(self, setting: Setting) -> Activate:
        name = setting.model.activation
        return fused(_ACTIVATIONS.get(name) or ACTIVATIONS[name].load())


def _reluctance(setting: Setting, name: str, one_kernel: tuple[str, ...]) -> Reluctance | None:
    if setting.device.is_cpu:
        return Reluctance("on a CPU compiling delays the first step")
    return Reluctance(f"torch's {name} is one kernel already") if name in one_kernel else None


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """As `ops.norm.rms_norm`."""
    wide = widened(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * widened(weight)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """As `ops.norm.layer_norm`. Written out because torch's decomposition, on a CPU, rounds the statistics to bf16."""
    wide = widened(x)
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    out = centred * scale * widened(weight)
    return (out if bias is None else out + widened(bias)).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """As `ops.activation.swiglu`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


_NORMS = {"layernorm": layer_norm, "rmsnorm": rms_norm}
_ACTIVATIONS = {"swiglu": swiglu}
