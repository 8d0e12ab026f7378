"""NVIDIA Apex's kernels for AdamW, LAMB and wgrad: `amp_C` and `fused_weight_gradient_mlp_cuda` (built with
--cuda_ext), `distributed_lamb_cuda` (--distributed_lamb); since 2026 in `apex._extensions`.

The optimizer kernels read step, learning rate and skip flag on the device: FusedAdam's capturable kernel, and the two
phases of DistributedFusedLAMB, with an all-reduce of norms between them. FusedLAMB does not fit: its fused kernel would
compute trust ratios of shards, and its two phases in `amp_C` update the moments even in a skipped step.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.config.train import OptimizerConfig
from megascale.core.errors import MegascaleError
from megascale.ops.library import error_of_import
from megascale.ops.optimizer import Segment
from megascale.ops.select import OpContext
from megascale.ops.wgrad import Wgrad

CHUNK = 1 << 16
"""Elements per thread block, as in Apex."""

NUMEL_LIMIT = 1 << 31
"""The kernels index elements with signed 32-bit integers."""

DECOUPLED = 1
"""The kernels' mode of decoupled weight decay."""


class ApexOptimizer:
    """AdamW and LAMB by Apex's kernels."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return _unsupported_reason(context, *RULES[context.optimizer].library)

    def build(self, context: OpContext) -> type[Any]:
        """Return an `Elementwise` or a `NeedsParamNorms` class."""
        return RULES[context.optimizer]


class ApexWgrad:
    """Megatron-LM's gradient accumulation fusion: cuBLAS with fp32 accumulation. The kernel always adds (beta = 1)."""

    library = ("fused_weight_gradient_mlp_cuda", "--cuda_ext")

    def unsupported_reason(self, context: OpContext) -> str | None:
        return _unsupported_reason(context, *self.library)

    def build(self, context: OpContext) -> Wgrad:
        accumulate = _kernels(self.library[0]).wgrad_gemm_accum_fp32

        def wgrad(total: Tensor, grad: Tensor, x: Tensor, add: bool) -> None:
            if not add:
                total.zero_()
            accumulate(x, grad, total)

        return wgrad


def _unsupported_reason(context: OpContext, name: str, flag: str) -> str | None:
    if context.device.is_cpu:
        return "needs an NVIDIA GPU"
    errors = [error_of_import(module) for module in _modules(name)]
    return f"NVIDIA Apex built with {flag} is not installed ({errors[0]})" if all(errors) else None


def _modules(name: str) -> tuple[str, str]:
    """Return the possible locations of a module of kernels."""
    return name, f"apex._extensions.{name}"


def _kernels(name: str) -> Any:
    return importlib.import_module(next(module for module in _modules(name) if not error_of_import(module)))


class _TensorLists:
    """Segments as the kernels' tensor lists, and their scalars on the device."""

    def __init__(self, segments: Sequence[Segment], names: Sequence[str]) -> None:
        self.size = len(segments)
        self.grads = [s.grad for s in segments]
        self.weights = [s.weight for s in segments]
        self.moments = [[s.state[name] for s in segments] for name in names]
        self._device = segments[0].weight.device if segments else torch.device("cpu")
        self.one = self.floats([1.0])
        self.rate = self.floats([0.0])
        self.step = torch.zeros(1, dtype=torch.int32, device=self._device)
        for weight in self.weights:
            if weight.numel() >= NUMEL_LIMIT:
                raise MegascaleError(
                    f"Apex's kernels cannot index {weight.numel()} elements", hint="backends.optimizer=torch"
                )

    def floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)


class ApexAdamW:
    """AdamW (`optim.adamw`) with FusedAdam's kernel."""

    library = ("amp_C", "--cuda_ext")
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        self._kernel = _kernels(self.library[0]).multi_tensor_adam_capturable
        groups = [([s for s in segments if s.weight_decay is decays], decays) for decays in (True, False)]
        self._groups = [
            (_TensorLists(group, self.state_names), config.weight_decay * decays) for group, decays in groups if group
        ]
        self._config = config

    def step(self, lr: float, step: int, grad_factor: Tensor, skip: Tensor) -> None:
        c, scale = self._config, grad_factor.float().view(1)
        for lists, decay in self._groups:
            lists.rate.fill_(lr)
            lists.step.fill_(step)
            self._kernel(
                CHUNK, skip.int(), [lists.grads, lists.weights, *lists.moments], lists.rate, c.betas[0], c.betas[1],
                c.eps, lists.step, DECOUPLED, int(c.bias_correction), decay, scale,
            )  # fmt: skip


class ApexLamb:
    """LAMB (`optim.lamb`) with DistributedFusedLAMB's kernels."""

    library = ("distributed_lamb_cuda", "--distributed_lamb")
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        self._kernels = _kernels(self.library[0])
        lists = self._lists = _TensorLists(segments, self.state_names)
        n = lists.size
        beta1, beta2 = config.betas
        self._betas = [lists.floats([value] * n) for value in (beta1, beta2, 1 - beta1)]
        self._correct = torch.full_like(lists.step, config.bias_correction).repeat(n)
        self._eps = lists.floats([config.eps] * n)
        self._decay = lists.floats([config.weight_decay * s.weight_decay for s in segments])
        self._indices = torch.arange(n, device=lists.step.device)
        matrices = [index for index, s in enumerate(segments) if s.is_matrix]
        self._matrices = torch.tensor(matrices, dtype=torch.int64, device=self._indices.device)

    def compute_updates(self, step: int, skip: Tensor) -> None:
        lists = self._lists
        if not lists.size:
            return
        lists.step.fill_(step)
        no_limit = 0.0  # gradients are already clipped; the kernel ignores the norm
        self._kernels.multi_tensor_lamb_compute_update_term(
            CHUNK, skip.int(), [lists.grads, lists.weights, *lists.moments, lists.grads], *self._betas, self._correct,
            lists.step, self._eps, DECOUPLED, self._decay, lists.one, lists.one, no_limit,
        )  # fmt: skip

    def apply_updates(self, lr: float, norms: Tensor, skip: Tensor) -> None:
        lists = self._lists
        if not lists.size:
            return
        lists.rate.fill_(lr)
        # zero norms of other segments give a trust ratio of 1, for any weight decay
        all_norms = norms.new_zeros(2, lists.size, dtype=torch.float32).index_copy_(1, self._matrices, norms.float())
        copies = lists.weights  # the kernel's compute-dtype copy supports only fp16, and is made elsewhere
        self._kernels.multi_tensor_lamb_update_weights(
            CHUNK, skip.int(), [lists.grads, lists.weights, copies], all_norms[0], all_norms[1], self._indices,
            lists.rate, self._decay, lists.one, True,
        )  # fmt: skip


RULES: dict[str, type[ApexAdamW] | type[ApexLamb]] = {"adamw": ApexAdamW, "lamb": ApexLamb}
"""Rules by the optimizer's name in the catalog."""
