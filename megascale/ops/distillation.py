"""Distillation (Hinton et al. 2015; SALT, arXiv 2410.18779): a teacher's tokens beside the label, on a rank's columns.

With temperature T, the student's softmax p of z / T, and the teacher's likeliest tokens i with q_i = softmax(t_i / T):

    loss of the gradient    (1 - alpha) CE + alpha T^2 KL        KL = sum_i q_i (log q_i - log p_i)
    d KL / d z_j            (p_j - q_j) / T,    q_j = 0 for the tokens that the teacher does not list

The factor T^2 keeps the gradient's size (Hinton et al., 2). p is over the whole vocabulary: with all of its tokens from
the teacher, the KL is that of the two models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.ops.cross_entropy import CrossEntropy, Reduce, Statistics, Targets, soft_cap, soft_cap_derivative


@dataclass(frozen=True)
class SoftLabels:
    """A teacher's likeliest tokens for every label of a micro-batch: global ids [s, b, k], i32, each once, and their
    log-probabilities [s, b, k], f32, which may lack a constant. `alpha`: share of the KL; `temperature`: T.
    """

    ids: Tensor
    log_probs: Tensor
    alpha: float
    temperature: float


@dataclass(frozen=True, kw_only=True)
class SoftCrossEntropy(CrossEntropy):
    """-sum_i q_i log p_i: the label's place is taken by tokens with their columns on this rank [t, k], i64, and shares
    q [t, k], 0 of tokens on another rank, whose columns are any.
    """

    columns: Tensor
    shares: Tensor

    def local_statistics(self, logits: Tensor, targets: Targets) -> Statistics:
        expected = (self.shares * self._at_columns(logits)).sum(1)  # `statistics` may overwrite the logits
        return super().local_statistics(logits, targets)._replace(at_label=expected)

    def local_share(self, targets: Targets) -> Tensor:
        return self.shares.sum(1)

    def write_gradient(self, logits: Tensor, targets: Targets, local_peak: Tensor, scale: Tensor) -> None:
        minus = self.shares * targets.weights.unsqueeze(1)
        if self.cap is not None:
            minus = minus * soft_cap_derivative(self._at_columns(logits), self.cap)
        self.gradient(logits, targets.local_columns, local_peak, scale, torch.zeros_like(scale), self.cap)
        logits.scatter_add_(1, self.columns, -minus.to(logits.dtype))

    def _at_columns(self, logits: Tensor) -> Tensor:
        return soft_cap(logits.gather(1, self.columns).to(self.shares.dtype), self.cap)


@dataclass(frozen=True)
class Distillation:
    """The loss of logits [t, n] with a teacher: one pass of the cross-entropy over them for the label, and one over a
    copy of them for the teacher's tokens, whose `columns` on this rank, or outside of it, and log-probabilities are
    [t, k].
    """

    cross_entropy: CrossEntropy
    columns: Tensor
    log_probs: Tensor
    alpha: float
    temperature: float

    def __call__(
        self, logits: Tensor, targets: Targets, reduce: Reduce, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sums [2] of the cross-entropy and of the KL, and the gradient, as `CrossEntropy` does."""
        own, copy = self.cross_entropy, logits / self.temperature
        q = torch.softmax(self.log_probs.to(targets.weights.dtype) / self.temperature, -1)
        remote = (self.columns < 0) | (self.columns >= targets.valid)
        soft = SoftCrossEntropy(
            own.statistics, own.gradient, own.cap and own.cap / self.temperature,
            columns=self.columns.masked_fill(remote, 0), shares=q.masked_fill(remote, 0),
        )  # fmt: skip
        entropy, _ = soft(copy, targets, reduce, gradient)
        kl = entropy + (torch.xlogy(q, q).sum(1) * targets.weights).sum()
        loss, grad = own(logits, targets, reduce, gradient)
        if grad is not None:
            grad.mul_(1 - self.alpha).add_(copy, alpha=self.alpha * self.temperature)
        return torch.stack([loss, kl]), grad
