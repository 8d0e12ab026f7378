"""Distillation (Hinton et al. 2015; SALT, arXiv 2410.18779): a teacher's tokens beside the label, on a rank's columns.

With temperature T, the student's softmax p of z / T, and the teacher's likeliest tokens i with q_i = softmax(t_i / T):

    loss of the gradient    (1 - alpha) CE + alpha T^2 KL        KL = sum_i q_i (log q_i - log p_i)
    d KL / d z_j            (p_j - q_j) / T,    q_j = 0 for the tokens that the teacher does not list

The factor T^2 keeps the gradient's size (Hinton et al., 2). p is over the whole vocabulary: with all of its tokens from
the teacher, the KL is that of the two models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megascale.ops.cross_entropy import CrossEntropy, Reduce, Targets, soft_cap, soft_cap_derivative


@dataclass(frozen=True)
class SoftLabels:
    """A teacher's likeliest tokens for every label of a micro-batch: global ids [s, b, k], i32, each once, and their
    log-probabilities [s, b, k], f32, which may lack a constant. `alpha`: share of the KL; `temperature`: T.
    """

    ids: Tensor
    log_probs: Tensor
    alpha: float
    temperature: float


@dataclass(frozen=True)
class SoftTargets(Targets):
    """Targets with a teacher's tokens: their columns on this rank [t, k], i64, and shares q [t, k], of all ranks."""

    soft_columns: Tensor
    shares: Tensor

    @cached_property
    def is_soft_local(self) -> Tensor:
        """Mark the teacher's tokens in this rank's shard, bool [t, k]."""
        return (self.soft_columns >= 0) & (self.soft_columns < self.valid)


@dataclass(frozen=True)
class Distillation:
    """The loss of logits [t, n] with a teacher, by the kernels of the cross-entropy: one pass over them for the label,
    and one over a copy of them for the teacher.
    """

    cross_entropy: CrossEntropy
    alpha: float
    temperature: float

    def __call__(
        self, logits: Tensor, targets: Targets, reduce: Reduce, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sums [2] of the cross-entropy and of the KL, and the gradient, as `CrossEntropy` does."""
        assert isinstance(targets, SoftTargets), "a distillation has a teacher's tokens"
        copy = logits / self.temperature
        kl = self._divergence(copy, targets, reduce, gradient)
        loss, grad = self.cross_entropy(logits, targets, reduce, gradient)
        if grad is not None:
            grad.mul_(1 - self.alpha).add_(copy)
        return torch.stack([loss, kl]), grad

    def _divergence(self, logits: Tensor, targets: SoftTargets, reduce: Reduce, gradient: bool) -> Tensor:
        """Return the weighted sum of the KL; write its part of the gradient over the logits, which are z / T."""
        cap, local = self.cross_entropy.cap, targets.is_soft_local
        kernels = replace(self.cross_entropy, cap=cap and cap / self.temperature, z_loss=0.0)
        columns, q = targets.soft_columns.masked_fill(~local, 0), targets.shares
        at_columns = soft_cap(logits.gather(1, columns).to(q.dtype), kernels.cap)  # `statistics` may overwrite them
        own = kernels.local_statistics(logits, targets)
        peak = own.peak.clone()
        reduce(peak, "max", label="teacher max")
        here = q.masked_fill(~local, 0)
        sums = torch.stack([own.total * (own.peak - peak).exp(), (here * (at_columns - peak.unsqueeze(1))).sum(1)])
        reduce(sums, "sum", label="teacher sums")
        total, expected = sums.unbind()
        loss = ((torch.xlogy(q, q).sum(1) + total.log() - expected) * targets.weights).sum()
        if gradient:
            weights = targets.weights * (self.alpha * self.temperature)
            scale, zeros = weights / total * (own.peak - peak).exp(), torch.zeros_like(weights)
            kernels.gradient(logits, targets.local_columns, own.peak, scale, zeros, kernels.cap)
            minus = here * weights.unsqueeze(1)
            if kernels.cap is not None:
                minus = minus * soft_cap_derivative(at_columns, kernels.cap)
            logits.scatter_add_(1, columns, -minus.to(logits.dtype))
        return loss


def shares_of(log_probs: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Return the shares q [t, k] of a teacher's tokens at a temperature."""
    return torch.softmax(log_probs.to(dtype) / temperature, -1)
