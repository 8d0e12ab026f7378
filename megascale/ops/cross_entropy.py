"""Cross-entropy over a sharded vocabulary: the loss, and its gradient, written in place over the logits.

    loss = sum_t w_t (log sum_j e^(z_tj) - z_t,label)        d loss / d z_tj = w_t (softmax(z_t)_j - [j = label])

With a soft cap c (Gemma 2) the logits x enter as z = c tanh(x / c), with derivative dz/dx = 1 - (z / c)^2.

A z-loss (Chowdhery et al. 2022, 5.1) of coefficient a adds a w_t Z^2 with Z = log sum_j e^(z_tj), to the gradient
alone: the loss stays the cross-entropy. Its derivative is 2 a w_t Z softmax(z_t)_j.

The sharpness of the loss (`train.logit_sharpness`) takes it at the worst point of a box around the logits,
|d_tj| <= radius (|z_tj| + 1): it rises with every logit but the label's, with which it falls, so this is a corner.

A backend computes on one device with a rank's columns of the logits z. The caller provides the all-reduces between
kernels as `Reduce` (`parallel.linear_cross_entropy`), or calls the parts one by one (`parallel.vocabulary_passes`).
`Targets`, `CrossEntropy`: the interface.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megascale.layout.loss import BLOCK_BYTES
from megascale.ops.library import triton_unsupported_reason
from megascale.ops.row_blocks import row_blocks
from megascale.ops.select import OpBackend, OpContext


@dataclass(frozen=True)
class Targets:
    """Labels and loss weights for logits [t, n] of a vocabulary shard.

    `columns` [t], i64: a label's column on this rank, outside [0, valid) if on another rank. `weights` [t], in the
    dtype of the loss. `valid`: columns of real tokens; the remaining n - valid columns are padding.
    """

    columns: Tensor
    weights: Tensor
    valid: int

    @cached_property
    def is_local(self) -> Tensor:
        """Mark labels in this rank's shard, bool [t]."""
        return (self.columns >= 0) & (self.columns < self.valid)

    @cached_property
    def local_columns(self) -> Tensor:
        """The labels' columns, 0 of labels on another rank."""
        return self.columns.masked_fill(~self.is_local, 0)


class Reduce(Protocol):
    """An in-place all-reduce of a contiguous tensor over the ranks of the vocabulary; `label` names the collective."""

    def __call__(self, tensor: Tensor, op: Literal["sum", "max"], *, label: str) -> object: ...


def no_reduce(tensor: Tensor, op: Literal["sum", "max"], *, label: str) -> None:
    """Do nothing: the `Reduce` of an unsharded vocabulary."""


class Statistics(NamedTuple):
    """Statistics of a rank's logits, or of all logits: maximum, sum of e^(logit - maximum), and the label's logit, each
    [t]; the last is 0 where the label is on another rank, and [2, t] with a teacher (`ops.distillation`).
    """

    peak: Tensor
    total: Tensor
    at_label: Tensor

    @classmethod
    def of_ranks(cls, parts: Tensor) -> Statistics:
        """Combine the statistics [ranks, 3, t] of all ranks."""
        peaks, totals, at_label = parts.unbind(1)
        peak = peaks.amax(0)
        return cls(peak, (totals * (peaks - peak).exp()).sum(0), at_label.sum(0))


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy over a rank's logits [t, n], contiguous, of any dtype, by two kernels, with softmax in the dtype of
    the loss.

    `statistics(logits, columns, wide, cap)`: returns max logit, sum of e^(logit - max), and logit at `columns`, [t] in
    dtype `wide`, all of capped logits; without a cap it may overwrite logits of dtype `wide` with e^(logit - max).
    `gradient(logits, columns, peak, scale, minus, cap)`: runs next with peak = max; overwrites the logits with
    scale e^(logit - peak), less `minus` at `columns`, times the derivative of the cap.
    `cap`: soft cap of the logits, or None. A logit of -inf stays -inf. `z_loss`: coefficient. `radius`: of the box at
    whose worst point the loss is taken, without a gradient.
    """

    statistics: Callable[[Tensor, Tensor, torch.dtype, float | None], tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float | None], None]
    cap: float | None = None
    z_loss: float = 0.0
    radius: float = 0.0

    def in_box(self, radius: float) -> CrossEntropy:
        """Return the loss at the worst point of a box; of radius 0 the loss itself."""
        return replace(self, radius=radius) if radius else self

    def __call__(
        self, logits: Tensor, targets: Targets, reduce: Reduce, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sum of losses and, with `gradient`, the gradient in the memory and dtype of the logits.
        Ranks all-reduce three elements per token: max logit, sum of exponentials, and the label's logit; with a teacher
        also what its tokens expect.
        """
        own = self.local_statistics(logits, targets)
        peak = own.peak.clone()
        reduce(peak, "max", label="logits max")
        sums = torch.stack([own.total * (own.peak - peak).exp_(), *torch.atleast_2d(own.at_label)])
        reduce(sums, "sum", label="softmax sums")
        every = Statistics(peak, sums[0], sums[1:].view_as(own.at_label))
        loss = ((every.total.log() - (every.at_label - peak)) * targets.weights).sum(-1)
        if not gradient:
            return loss, None
        self.write_gradient(logits, targets, own.peak, self.softmax_scale(targets, own.peak, every))
        return loss, logits

    def local_statistics(self, logits: Tensor, targets: Targets) -> Statistics:
        """Return the statistics of a rank's logits, which `gradient` may need as this leaves them."""
        wide, cap = targets.weights.dtype, self.cap
        if self.radius:
            logits, cap = worst_logits(soft_cap(logits.to(wide), cap), targets, self.radius), None
        logits[:, targets.valid :] = -math.inf
        found = self.statistics(logits, targets.local_columns, wide, cap)
        return Statistics(*found[:2], found[2].masked_fill(~targets.is_local, 0))

    def softmax_scale(self, targets: Targets, local_peak: Tensor, every: Statistics) -> Tensor:
        """Return the factor [t] that makes e^(logit - local_peak) the gradient of the loss, but for the label's."""
        scale = targets.weights / every.total * (local_peak - every.peak).exp()
        return scale * (1 + 2 * self.z_loss * (every.peak + every.total.log())) if self.z_loss else scale

    def write_gradient(self, logits: Tensor, targets: Targets, local_peak: Tensor, scale: Tensor) -> None:
        """Write the gradient over a rank's logits."""
        minus = targets.weights * targets.is_local
        self.gradient(logits, targets.local_columns, local_peak, scale, minus, self.cap)


class TorchCrossEntropy(OpBackend):
    """torch's operators over blocks of rows."""

    def build(self, context: OpContext) -> CrossEntropy:
        return CrossEntropy(statistics, gradient, context.model.logit_softcap, context.z_loss)


class TritonCrossEntropy:
    """A Triton kernel for the statistics and another for the gradient."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return triton_unsupported_reason(context.device)

    def build(self, context: OpContext) -> CrossEntropy:
        from megascale.ops import triton_cross_entropy as kernels

        return CrossEntropy(kernels.statistics, kernels.gradient, z_loss=context.z_loss)


GPU_BLOCK_BYTES = 1 << 26  # block size on GPUs, where few kernel launches matter more than cache locality


def statistics(logits: Tensor, columns: Tensor, wide: torch.dtype, cap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `CrossEntropy.statistics`."""
    # the cap is monotonic: the largest logit stays the largest
    peak = soft_cap(logits.amax(-1).to(wide), cap).clamp_(min=torch.finfo(wide).min)
    at_label = soft_cap(logits.gather(1, columns.unsqueeze(1)).squeeze(1).to(wide), cap)
    total = torch.empty_like(peak)
    for rows in _blocks(logits, wide):
        torch.sum(_exponentials(soft_cap(logits[rows].to(wide), cap), peak[rows]), -1, out=total[rows])
    return peak, total, at_label


def gradient(logits: Tensor, columns: Tensor, peak: Tensor, scale: Tensor, minus: Tensor, cap: float | None) -> None:
    """Implement `CrossEntropy.gradient`."""
    for rows in _blocks(logits, peak.dtype):  # in a function, whose temporaries end before the next block's begin
        _block_gradient(logits[rows], columns[rows], peak[rows], scale[rows], minus[rows], cap)


def _block_gradient(
    block: Tensor, columns: Tensor, peak: Tensor, scale: Tensor, minus: Tensor, cap: float | None
) -> None:
    in_place = block.dtype == peak.dtype and cap is None  # `statistics` wrote the exponentials over the logits
    capped = block if in_place else soft_cap(block.to(peak.dtype), cap)
    derivative = None if cap is None else soft_cap_derivative(capped, cap)
    grad = block if in_place else _exponentials(capped, peak)
    grad.mul_(scale.unsqueeze(1)).scatter_add_(1, columns.unsqueeze(1), -minus.unsqueeze(1))
    if derivative is not None:
        grad.mul_(derivative)
    if not in_place:
        block.copy_(grad)


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap tanh(logits / cap), and -inf for -inf, in a new tensor; without a cap the logits themselves."""
    return logits if cap is None else (cap * torch.tanh(logits / cap)).masked_fill(logits == -math.inf, -math.inf)


def soft_cap_derivative(capped: Tensor, cap: float) -> Tensor:
    """Return the derivative of `soft_cap` by its result: 1 - (z / cap)^2, and 0 for -inf."""
    return (1 - (capped / cap).square()).clamp(min=0)


def worst_logits(logits: Tensor, targets: Targets, radius: float) -> Tensor:
    """Return the logits in a box of this radius with the largest loss, in a new tensor."""
    reach, columns = (logits.abs() + 1) * radius, targets.local_columns.unsqueeze(1)
    at_label = reach.gather(1, columns)
    reach.scatter_(1, columns, torch.where(targets.is_local.unsqueeze(1), -at_label, at_label))
    return logits + reach


cross_entropy = CrossEntropy(statistics, gradient)


def _exponentials(logits: Tensor, peak: Tensor) -> Tensor:
    """Return e^(logit - peak) in place."""
    return logits.sub_(peak.unsqueeze(1)).exp_()


def _blocks(logits: Tensor, wide: torch.dtype) -> list[slice]:
    block_bytes = BLOCK_BYTES if logits.is_cpu else GPU_BLOCK_BYTES
    return row_blocks(logits, logits.shape[1] * wide.itemsize, block_bytes)
