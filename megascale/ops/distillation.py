"""Distillation (Hinton et al. 2015; SALT, arXiv 2410.18779): a teacher's tokens beside the label, on a rank's columns.

With the student's softmax p, and q = softmax(t) of the teacher's log-probabilities t of its likeliest tokens i:

    loss of the gradient    (1 - alpha) CE + alpha KL        KL = sum_i q_i (log q_i - log p_i)
    its derivative by z_j   p_j - (1 - alpha) [j = label] - alpha q_j,    q_j = 0 for tokens that the teacher lacks

p is over the whole vocabulary: with all of its tokens from the teacher, the KL is that of the two models. Both losses
have the softmax in common, and one pass over the logits computes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megascale.ops.cross_entropy import CrossEntropy, Statistics, Targets, soft_cap, soft_cap_derivative


@dataclass(frozen=True)
class SoftLabels:
    """A teacher's likeliest tokens for every label of a micro-batch: global ids [s, b, k], i32, each once, and their
    log-probabilities [s, b, k], f32, which may lack a constant. `alpha`: share of the KL.
    """

    ids: Tensor
    log_probs: Tensor
    alpha: float


@dataclass(frozen=True, kw_only=True)
class Distillation(CrossEntropy):
    """The losses [2] of the label and of the teacher, whose tokens have their columns on this rank [t, k], i64, and
    shares q [t, k], 0 of tokens on another rank, whose columns are any. The gradient is that of both.
    """

    columns: Tensor
    shares: Tensor
    alpha: float

    def local_statistics(self, logits: Tensor, targets: Targets) -> Statistics:
        expected = (self.shares * self._at_columns(logits) - torch.xlogy(self.shares, self.shares)).sum(1)
        own = super().local_statistics(logits, targets)  # after it, which may overwrite the logits
        return own._replace(at_label=torch.stack([own.at_label, expected]))

    def write_gradient(self, logits: Tensor, targets: Targets, local_peak: Tensor, scale: Tensor) -> None:
        minus = self.alpha * self.shares * targets.weights.unsqueeze(1)
        if self.cap is not None:
            minus = minus * soft_cap_derivative(self._at_columns(logits), self.cap)
        own = replace(targets, weights=(1 - self.alpha) * targets.weights)
        super().write_gradient(logits, own, local_peak, scale)
        logits.scatter_add_(1, self.columns, -minus.to(logits.dtype))

    def _at_columns(self, logits: Tensor) -> Tensor:
        return soft_cap(logits.gather(1, self.columns).to(self.shares.dtype), self.cap)
