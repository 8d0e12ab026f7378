"""NVIDIA Apex's kernels: fused norms (built with --cuda_ext), and LAMB by the two phases of DistributedFusedLAMB
(--distributed_lamb), `distributed_lamb_cuda`, since 2026 in `apex._extensions`.

The kernels of LAMB read step, learning rate and skip flag on the device, with an all-reduce of norms between them.
FusedLAMB does not fit: its fused kernel would compute trust ratios of shards, and its two phases in `amp_C` update the
moments even in a skipped step.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.config.train import OptimizerConfig
from megascale.core.errors import MegascaleError
from megascale.ops.library import APEX, error_of_import
from megascale.ops.norm import Normalize
from megascale.ops.optimizer import Segment
from megascale.ops.select import OpContext

CHUNK = 1 << 16  # elements per thread block, as in Apex
NUMEL_LIMIT = 1 << 31  # the kernels index elements with signed 32-bit integers
DECOUPLED = 1  # the kernels' mode of decoupled weight decay

LAMB_MODULES = ("distributed_lamb_cuda", "apex._extensions.distributed_lamb_cuda")
"""Possible locations of LAMB's kernels."""


class ApexNorm:
    """`fused_rms_norm_affine` and `fused_layer_norm_affine`, with fp32 statistics."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return APEX.unsupported_reason(context)

    def build(self, context: OpContext) -> Normalize:
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine

        def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            return fused_rms_norm_affine(x, weight, weight.shape, eps)

        def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            return fused_layer_norm_affine(x, weight, bias, weight.shape, eps)

        return {"rmsnorm": rms_norm, "layernorm": layer_norm}[context.model.norm]


class ApexOptimizer:
    """LAMB by Apex's kernels."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        if context.device.is_cpu:
            return "needs an NVIDIA GPU"
        errors = [error_of_import(module) for module in LAMB_MODULES]
        return f"NVIDIA Apex built with --distributed_lamb is not installed ({errors[0]})" if all(errors) else None

    def build(self, context: OpContext) -> type[ApexLamb]:
        """Return a `NeedsParamNorms` class."""
        return ApexLamb


class ApexLamb:
    """LAMB (`optim.lamb`): the segments as the kernels' tensor lists, and their scalars on the device."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        self._kernels: Any = importlib.import_module(next(m for m in LAMB_MODULES if not error_of_import(m)))
        self._grads = [s.grad for s in segments]
        self._weights = [s.weight for s in segments]
        self._moments = [[s.state[name] for s in segments] for name in self.state_names]
        for weight in self._weights:
            if weight.numel() >= NUMEL_LIMIT:
                raise MegascaleError(
                    f"Apex's kernels cannot index {weight.numel()} elements", hint="backends.optimizer=torch"
                )
        device = segments[0].weight.device if segments else torch.device("cpu")

        def floats(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        n, (beta1, beta2) = len(segments), config.betas
        self._one, self._rate = floats([1.0]), floats([0.0])
        self._step = torch.zeros(1, dtype=torch.int32, device=device)
        self._betas = [floats([value] * n) for value in (beta1, beta2, 1 - beta1)]
        self._correct = torch.full_like(self._step, config.bias_correction).repeat(n)
        self._eps = floats([config.eps] * n)
        self._decay = floats([config.weight_decay * s.weight_decay for s in segments])
        self._indices = torch.arange(n, device=device)
        matrices = [index for index, s in enumerate(segments) if s.is_matrix]
        self._matrices = torch.tensor(matrices, dtype=torch.int64, device=device)

    def compute_updates(self, step: int, skip: Tensor) -> None:
        if not self._grads:
            return
        self._step.fill_(step)
        no_limit = 0.0  # gradients are already clipped; the kernel ignores the norm
        self._kernels.multi_tensor_lamb_compute_update_term(
            CHUNK, skip.int(), [self._grads, self._weights, *self._moments, self._grads], *self._betas, self._correct,
            self._step, self._eps, DECOUPLED, self._decay, self._one, self._one, no_limit,
        )  # fmt: skip

    def apply_updates(self, lr: float, norms: Tensor, skip: Tensor) -> None:
        if not self._grads:
            return
        self._rate.fill_(lr)
        # zero norms of other segments give a trust ratio of 1, for any weight decay
        all_norms = norms.new_zeros(2, len(self._grads), dtype=torch.float32)
        all_norms.index_copy_(1, self._matrices, norms.float())
        copies = self._weights  # the kernel's compute-dtype copy supports only fp16, and is made elsewhere
        self._kernels.multi_tensor_lamb_update_weights(
            CHUNK, skip.int(), [self._grads, self._weights, copies], all_norms[0], all_norms[1], self._indices,
            self._rate, self._decay, self._one, True,
        )  # fmt: skip
