"""NVIDIA Apex's kernels: `amp_C`, built with --cuda_ext, `distributed_lamb_cuda`, with --distributed_lamb, and
`fused_weight_gradient_mlp_cuda`, with --cuda_ext; since 2026 in `apex._extensions`.

Of optimizers with the same result, the ones whose kernels read step, rate and whether to skip on the device:
FusedAdam's for CUDA graphs, and the two halves of DistributedFusedLAMB, between which norms can be summed over ranks.
FusedLAMB's own kernel forms its ratios from the tensors that it is given, which would be parts of parameters, and the
halves of it in `amp_C` update the moments also in a step that is to be skipped.
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
from megascale.ops.select import Setting
from megascale.ops.wgrad import Wgrad

CHUNK = 1 << 16
"""Numbers that a block of threads treats, as in Apex."""

MOST = 1 << 31
"""The kernels count the numbers of a tensor in 32 bits with a sign."""

DECOUPLED = 1
"""The kernels' mode in which weight decay is no part of the gradient."""


class ApexOptimizer:
    """AdamW and LAMB."""

    def refusal(self, setting: Setting) -> str | None:
        return _refusal(setting, *RULES[setting.optimizer].library)

    def build(self, setting: Setting) -> type[Any]:
        """An `Elementwise` or a `Normwise`."""
        return RULES[setting.optimizer]


class ApexWgrad:
    """The GEMM of Megatron-LM's gradient accumulation fusion: cuBLAS with fp32 sums. It always adds."""

    library = ("fused_weight_gradient_mlp_cuda", "--cuda_ext")

    def refusal(self, setting: Setting) -> str | None:
        return _refusal(setting, *self.library)

    def build(self, setting: Setting) -> Wgrad:
        accumulate = _kernels(self.library[0]).wgrad_gemm_accum_fp32

        def wgrad(total: Tensor, grad: Tensor, x: Tensor, add: bool) -> None:
            if not add:
                total.zero_()
            accumulate(x, grad, total)

        return wgrad


def _refusal(setting: Setting, name: str, flag: str) -> str | None:
    if setting.device.is_cpu:
        return "needs an NVIDIA GPU"
    errors = [error_of_import(module) for module in _modules(name)]
    return f"NVIDIA Apex built with {flag} is not installed ({errors[0]})" if all(errors) else None


def _modules(name: str) -> tuple[str, str]:
    """Where a module of kernels may be."""
    return name, f"apex._extensions.{name}"


def _kernels(name: str) -> Any:
    return importlib.import_module(next(module for module in _modules(name) if not error_of_import(module)))


class _Lists:
    """Segments as the kernels want them, and scalars on the device that they read."""

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
            if weight.numel() >= MOST:
                raise MegascaleError(
                    f"Apex's kernels cannot treat {weight.numel()} numbers at once", mend="backends.optimizer=torch"
                )

    def floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)


class ApexAdamW:
    """AdamW (`optim.adamw`) by FusedAdam's kernel."""

    library = ("amp_C", "--cuda_ext")
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        self._kernel = _kernels(self.library[0]).multi_tensor_adam_capturable
        groups = [([s for s in segments if s.weight_decay is decays], decays) for decays in (True, False)]
        self._groups = [
            (_Lists(group, self.state_names), config.weight_decay * decays) for group, decays in groups if group
        ]
        self._config = config

    def step(self, lr: float, step: int, factor: Tensor, skip: Tensor) -> None:
        c, scale = self._config, factor.float().view(1)
        for lists, decay in self._groups:
            lists.rate.fill_(lr)
            lists.step.fill_(step)
            self._kernel(
                CHUNK, skip.int(), [lists.grads, lists.weights, *lists.moments], lists.rate, c.betas[0], c.betas[1],
                c.eps, lists.step, DECOUPLED, int(c.bias_correction), decay, scale,
            )  # fmt: skip


class ApexLamb:
    """LAMB (`optim.lamb`) by the kernels of DistributedFusedLAMB."""

    library = ("distributed_lamb_cuda", "--distributed_lamb")
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        self._kernels = _kernels(self.library[0])
        lists = self._lists = _Lists(segments, self.state_names)
        n = lists.size
        beta1, beta2 = config.betas
        self._betas = [lists.floats([value] * n) for value in (beta1, beta2, 1 - beta1)]
        self._correct = torch.full_like(lists.step, config.bias_correction).repeat(n)
        self._eps = lists.floats([config.eps] * n)
        self._decay = lists.floats([config.weight_decay * s.weight_decay for s in segments])
        self._places = torch.arange(n, device=lists.step.device)
        matrices = [index for index, s in enumerate(segments) if s.is_matrix]
        self._matrices = torch.tensor(matrices, dtype=torch.int64, device=self._places.device)

    def direct(self, step: int, skip: Tensor) -> None:
        lists = self._lists
        if not lists.size:
            return
        lists.step.fill_(step)
        no_limit = 0.0  # gradients are clipped already; the norm is not read
        self._kernels.multi_tensor_lamb_compute_update_term(
            CHUNK, skip.int(), [lists.grads, lists.weights, *lists.moments, lists.grads], *self._betas, self._correct,
            lists.step, self._eps, DECOUPLED, self._decay, lists.one, lists.one, no_limit,
        )  # fmt: skip

    def apply(self, lr: float, norms: Tensor, skip: Tensor) -> None:
        lists = self._lists
        if not lists.size:
            return
        lists.rate.fill_(lr)
        # a norm of zero gives a ratio of 1, whatever the weight decay is
        every = norms.new_zeros(2, lists.size, dtype=torch.float32).index_copy_(1, self._matrices, norms.float())
        weights_too = lists.weights  # a copy in the format of compute: fp16 only, so it is made elsewhere
        self._kernels.multi_tensor_lamb_update_weights(
            CHUNK, skip.int(), [lists.grads, lists.weights, weights_too], every[0], every[1], self._places, lists.rate,
            self._decay, lists.one, True,
        )  # fmt: skip


RULES: dict[str, type[ApexAdamW] | type[ApexLamb]] = {"adamw": ApexAdamW, "lamb": ApexLamb}
"""By the optimizer's name in the catalog."""
