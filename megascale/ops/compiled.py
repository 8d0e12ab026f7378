"""torch.compile: its requirements, and the backends with formulas for Inductor to fuse: norms, activations, rope, loss.

With train.compile, the operations between a block's linear layers are compiled. The linear layers stay eager: they
communicate, and accumulate into main gradients outside autograd.
"""

from __future__ import annotations

import getpass
import math
import os
import re
import shutil
import stat
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.layers import ACTIVATIONS, NORMS
from megascale.core.files import exists
from megascale.device import Device
from megascale.ops.activation import LIMIT, SLOPE, Activate
from megascale.ops.cross_entropy import CrossEntropy, soft_cap, soft_cap_derivative
from megascale.ops.known_amax import keeping_row_amax, with_row_amax
from megascale.ops.library import triton_unsupported_reason
from megascale.ops.norm import AddNormalize, Normalize, compose_add_norm, other_norm_requested, widened
from megascale.ops.rope import Rotate, rotate_by, rotation
from megascale.ops.select import BackendError, CompileFn, NotByDefault, OpContext

RECOMPILE_LIMIT = 128
"""Graphs per function before torch falls back to eager. The casts of one block exceed torch's default, 8."""


def cpp_compiler() -> str:
    """Return the C++ compiler of torch.compile for CPUs."""
    return os.environ.get("CXX", "g++")


def compile_unsupported_reason(device: Device) -> str | None:
    """Say why torch.compile cannot compile for a device; None if supported."""
    if reason := _cache_problem():
        return reason
    if device.is_cpu:
        if shutil.which(cpp_compiler()) is None:
            return f"no C++ compiler: there is no {cpp_compiler()}"
        headers = Path(sysconfig.get_path("include"))
        return None if exists(headers / "Python.h", optional=True) else f"no Python.h in {headers}"
    return triton_unsupported_reason(device)


def default_cache_folder() -> Path:
    """Return torch's default folder of compiled code, without the second that the import of its compiler takes."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def _cache_problem() -> str | None:
    """Say why torch's default folder of compiled code, which torch unpickles and runs, cannot be trusted. Make it
    private if it is this user's; a folder in TORCHINDUCTOR_CACHE_DIR is the user's own choice.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return None
    folder = default_cache_folder()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if facts.st_uid == os.geteuid() and stat.S_ISDIR(facts.st_mode):
            folder.chmod(0o700)
            return None
    except OSError as error:
        return f"no folder for compiled code: {folder}: {error.strerror}; set TORCHINDUCTOR_CACHE_DIR"
    return f"another user made {folder}, from which torch would run compiled code; set TORCHINDUCTOR_CACHE_DIR"


def block_compile_fn(device: Device) -> CompileFn:
    """Return the compilation that a block applies to its fusible functions under train.compile.

    Raises: BackendError if torch.compile cannot run
    """
    if reason := compile_unsupported_reason(device):
        raise BackendError(f"train.compile: {reason}", hint="install it, or train.compile=false")
    return compile_function


def compile_function(function: Callable[..., Any], *, dynamic: bool = False) -> Callable[..., Any]:
    """Compile `function` with static shapes: a run has few shapes, and specialized kernels are faster. `dynamic`: for
    any number of rows, as experts have.
    """
    dynamo = torch._dynamo.config  # process-wide: torch before 2.13 has no limit per function
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    return torch.compile(function, dynamic=dynamic)


class CompiledNorm:
    """Compiled norms: the formulas below, or a norm registered by another package."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return compile_unsupported_reason(context.device) or _not_by_default(
            context, context.model.norm, one_kernel=("layernorm",)
        )

    def build(self, context: OpContext) -> Normalize:
        name = context.model.norm
        return _compile(context, _NORMS.get(name) or NORMS[name].load())


class CompiledAddNorm:
    """The residual sum and its norm, in one forward kernel."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        not_default = _not_by_default(context, context.model.norm, one_kernel=())
        return compile_unsupported_reason(context.device) or not_default or other_norm_requested(context, "compile")

    def build(self, context: OpContext) -> AddNormalize:
        name = context.model.norm
        return _compile(context, compose_add_norm(_NORMS.get(name) or NORMS[name].load()))


def _compile(context: OpContext, function: Callable[..., Any], *, dynamic: bool = False) -> Callable[..., Any]:
    """Compile a norm or activation, whose kernel also finds an amax that FP8 layers take."""
    if not context.takes_amax:
        return compile_function(function, dynamic=dynamic)
    return keeping_row_amax(compile_function(with_row_amax(function), dynamic=dynamic))


class CompiledActivation:
    """Compiled activations: the formulas below, or an activation registered by another package."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        name = context.model.activation
        return compile_unsupported_reason(context.device) or _not_by_default(
            context, name, one_kernel=("gelu", "gelu_tanh")
        )

    def build(self, context: OpContext) -> Activate:
        name = context.model.activation
        activate = _ACTIVATIONS.get(name) or ACTIVATIONS[name].load()
        return _compile(context, activate, dynamic=context.model.experts > 0)


class CompiledRope:
    """A compiled kernel for forward and a compiled kernel for backward."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        not_default = NotByDefault("on a CPU compiling delays the first step") if context.device.is_cpu else None
        return compile_unsupported_reason(context.device) or not_default

    def build(self, context: OpContext) -> Rotate:
        return partial(rotate_by, compile_function(rotation))


def _not_by_default(context: OpContext, name: str, one_kernel: tuple[str, ...]) -> NotByDefault | None:
    if context.device.is_cpu:
        return NotByDefault("on a CPU compiling delays the first step")
    alone = name in one_kernel and not context.takes_amax
    return NotByDefault(f"torch's {name} is one kernel already") if alone else None


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute `ops.norm.rms_norm`."""
    wide = widened(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * widened(weight)).to(x.dtype)


def rms_norm_1p(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute `ops.norm.rms_norm_1p`."""
    return rms_norm(x, 1 + widened(weight), bias, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute `ops.norm.layer_norm`. On a CPU torch's own decomposition rounds the statistics to bf16."""
    wide = widened(x)
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    out = centred * scale * widened(weight)
    return (out if bias is None else out + widened(bias)).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute `ops.activation.swiglu`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    """Compute `ops.activation.geglu`."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """Compute `ops.activation.clamped_swiglu`."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=LIMIT)
    return gate * torch.sigmoid(SLOPE * gate) * (up.clamp(-LIMIT, LIMIT) + 1)


_NORMS = {"layernorm": layer_norm, "rmsnorm": rms_norm, "rmsnorm_1p": rms_norm_1p}
_ACTIVATIONS = {"swiglu": swiglu, "geglu": geglu, "clamped_swiglu": clamped_swiglu}


class CompiledCrossEntropy:
    """A compiled kernel for the statistics and another for the gradient. On a CPU only on request."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        slow = NotByDefault("takes seconds to compile on a CPU") if context.device.is_cpu else None
        return compile_unsupported_reason(context.device) or slow

    def build(self, context: OpContext) -> CrossEntropy:
        return CrossEntropy(
            compile_function(fused_statistics),
            compile_function(fused_gradient),
            context.model.logit_softcap,
            context.z_loss,
        )


def fused_statistics(
    logits: Tensor, columns: Tensor, wide: torch.dtype, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `CrossEntropy.statistics` without writing [t, n]. Inductor compiles maximum and sum of exponentials to
    an online softmax (Milakov and Gimelshein 2018): on a GPU the logits are read once.
    """
    scores = soft_cap(logits.to(wide), cap)
    highest = scores.amax(-1, keepdim=True)
    total = (scores - highest).exp().sum(-1, keepdim=True)
    total = torch.where(highest == -math.inf, 0.0, total).squeeze(1)  # a shard may contain only padding
    peak = highest.squeeze(1).clamp(min=torch.finfo(wide).min)
    return peak, total, scores.gather(1, columns.unsqueeze(1)).squeeze(1)


def fused_gradient(
    logits: Tensor, columns: Tensor, peak: Tensor, scale: Tensor, minus: Tensor, cap: float | None
) -> None:
    """Implement `CrossEntropy.gradient`."""
    is_label = torch.arange(logits.shape[1], device=logits.device) == columns.unsqueeze(1)
    scores = soft_cap(logits.to(peak.dtype), cap)
    grad = (scores - peak.unsqueeze(1)).exp() * scale.unsqueeze(1)
    grad = torch.where(is_label, grad - minus.unsqueeze(1), grad)
    logits.copy_(grad if cap is None else grad * soft_cap_derivative(scores, cap))
