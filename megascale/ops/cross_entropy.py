"""The loss of some tokens, and the gradient of their logits, which takes the logits' place.

A backend is given this rank's columns of the logits, for the vocabulary may be sharded. It computes on one device; the
all-reduces between its passes are `Reduce`, which its caller brings (`parallel.cross_entropy`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megascale.layout.loss import BLOCK_BYTES
from megascale.ops import compiled
from megascale.ops.library import TE
from megascale.ops.select import Backend, Reluctance, Setting


@dataclass(frozen=True)
class Targets:
    """What logits [t, n] are compared with. `columns` [t], i64: where on this rank each token's label is, a number
    outside of [0, valid) if it is not; `weights` [t], in the format of the loss: how much each token counts; `valid`:
    how many of the n columns are real; the others, which come after them, are padding.
    """

    columns: Tensor
    weights: Tensor
    valid: int

    @property
    def here(self) -> Tensor:
        """Which labels this rank has, bool [t]."""
        return (self.columns >= 0) & (self.columns < self.valid)


class Reduce(Protocol):
    """All-reduces a contiguous tensor in place over the ranks that hold the vocabulary. `what` labels it."""

    def __call__(self, tensor: Tensor, op: Literal["sum", "max"], *, what: str) -> object: ...


def unsharded(tensor: Tensor, op: Literal["sum", "max"], *, what: str) -> None:
    """Leave the tensor as it is: the `Reduce` of a rank that holds the whole vocabulary."""


CrossEntropy = Callable[[Tensor, Targets, Reduce, bool], tuple[Tensor, Tensor | None]]
"""Logits [t, n], contiguous, of any dtype; the all-reduce over the vocabulary's ranks; whether a gradient is wanted.
Returns the weighted sum of -log softmax over the tokens, and its gradient in the place and dtype of the logits, or
None.
"""


@dataclass(frozen=True)
class Passes:
    """What goes over the logits of one rank, with softmax in the format of the loss.

    `statistics(logits, columns, wide)`: [t] each in the format `wide`: the largest logit, the sum of e^(logit -
    largest), and the logit at `columns`. It may write e^(logit - largest) over logits of that format.
    `gradient(logits, columns, peak, scale, minus)`, after it and with its largest logits: writes scale e^(logit - peak)
    over the logits, minus `minus` at `columns`.
    """

    statistics: Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]

    def cross_entropy(
        self, logits: Tensor, targets: Targets, reduce: Reduce, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `CrossEntropy`. Ranks exchange the largest logit, and the sum of exponentials with the label's logit:
        three elements a token.
        """
        weights, here = targets.weights, targets.here
        columns = targets.columns.masked_fill(~here, 0)
        logits[:, targets.valid :] = -math.inf
        local, total, own = self.statistics(logits, columns, weights.dtype)
        peak = local.clone()
        reduce(peak, "max", what="loss peak")
        less = (local - peak).exp_()
        sums = torch.stack([total * less, (own - peak).masked_fill_(~here, 0)])
        reduce(sums, "sum", what="loss sums")
        total, chosen = sums.unbind()
        loss = ((total.log() - chosen) * weights).sum()
        if not gradient:
            return loss, None
        self.gradient(logits, columns, local, weights / total * less, weights * here)
        return loss, logits


class TorchCrossEntropy(Backend):
    """torch's operators, over blocks of rows."""

    def build(self, setting: Setting) -> CrossEntropy:
        return cross_entropy


GPU_BLOCK_BYTES = 1 << 26
"""Instead of BLOCK_BYTES, where few kernels matter more than a cache."""


def statistics(logits: Tensor, columns: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """See `Passes`."""
    peak = logits.amax(-1).to(wide).clamp_(min=torch.finfo(wide).min)
    own = logits.gather(1, columns.unsqueeze(1)).squeeze(1).to(wide)
    total = torch.empty_like(peak)
    for rows in _blocks(logits, wide):
        torch.sum(_exponentials(logits[rows], peak[rows]), -1, out=total[rows])
    return peak, total, own


def gradient(logits: Tensor, columns: Tensor, peak: Tensor, scale: Tensor, minus: Tensor) -> None:
    """See `Passes`."""
    for rows in _blocks(logits, peak.dtype):
        _block_gradient(logits[rows], columns[rows], peak[rows], scale[rows], minus[rows])


def _block_gradient(block: Tensor, columns: Tensor, peak: Tensor, scale: Tensor, minus: Tensor) -> None:
    there = block.dtype == peak.dtype
    numbers = block if there else _exponentials(block, peak)
    numbers.mul_(scale.unsqueeze(1)).scatter_add_(1, columns.unsqueeze(1), -minus.unsqueeze(1))
    if not there:
        block.copy_(numbers)


cross_entropy = Passes(statistics, gradient).cross_entropy


def _exponentials(block: Tensor, peak: Tensor) -> Tensor:
    """e^(logit - peak) in the format of the peak, in place where the logits have it."""
    return block.to(peak.dtype).sub_(peak.unsqueeze(1)).exp_()


def _blocks(logits: Tensor, wide: torch.dtype) -> list[slice]:
    most = BLOCK_BYTES if logits.is_cpu else GPU_BLOCK_BYTES
    rows = max(1, most // (logits.shape[1] * wide.itemsize))
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


class CompiledCrossEntropy:
    """One kernel for the statistics and one for the gradient, by torch.compile. On a CPU only if asked for."""

    def refusal(self, setting: Setting) -> str | None:
        slow = Reluctance("takes seconds to compile on a CPU") if setting.device.is_cpu else None
        return compiled.refusal(setting.device) or slow

    def build(self, setting: Setting) -> CrossEntropy:
        return Passes(compiled.fused(fused_statistics), compiled.fused(fused_gradient)).cross_entropy


def fused_statistics(logits: Tensor, columns: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """See `Passes`. Compiled, no number of [t, n] is written, and on a GPU the logits are read once: Inductor knows the
    maximum and the sum of exponentials below it as an online softmax (Milakov and Gimelshein 2018).
    """
    scores = logits.to(wide)
    highest = scores.amax(-1, keepdim=True)
    total = (scores - highest).exp().sum(-1, keepdim=True)
    total = torch.where(highest == -math.inf, 0.0, total).squeeze(1)  # a rank may have padding alone
    peak = highest.squeeze(1).clamp(min=torch.finfo(wide).min)
    return peak, total, scores.gather(1, columns.unsqueeze(1)).squeeze(1)


def fused_gradient(logits: Tensor, columns: Tensor, peak: Tensor, scale: Tensor, minus: Tensor) -> None:
    """See `Passes`."""
    label = torch.arange(logits.shape[1], device=logits.device) == columns.unsqueeze(1)
    numbers = (logits.to(peak.dtype) - peak.unsqueeze(1)).exp() * scale.unsqueeze(1)
    logits.copy_(torch.where(label, numbers - minus.unsqueeze(1), numbers))


class TransformerEngineCrossEntropy:
    """Transformer Engine's kernels: one pass over the logits for the loss and one for the gradient, both in fp32."""

    def refusal(self, setting: Setting) -> str | None:
        if setting.device.is_cpu:
            return "is for GPUs"
        if reason := TE.absence():
            return reason
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        if "overwrite_input" not in inspect.signature(parallel_cross_entropy).parameters:
            return "needs a release with overwrite_input (none up to 2.19): this one forms a second tensor of logits"
        return None

    def build(self, setting: Setting) -> CrossEntropy:
        return transformer_engine_cross_entropy


IGNORED = -100
"""What Transformer Engine takes for a label that does not count."""


def transformer_engine_cross_entropy(
    logits: Tensor, targets: Targets, reduce: Reduce, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """See `CrossEntropy`. For a vocabulary that is not sharded: it reduces nothing."""
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    logits[:, targets.valid :] = -math.inf
    labels = targets.columns.masked_fill(~targets.here, IGNORED).unsqueeze(1)
    with torch.set_grad_enabled(gradient):
        scores = logits.detach().unsqueeze(1).requires_grad_(gradient)
        losses = parallel_cross_entropy(scores, labels, ignore_idx=IGNORED, overwrite_input=True).squeeze(1)
        loss = (losses * targets.weights).sum()
    if not gradient:
        return loss, None
    (grad,) = torch.autograd.grad(loss, scores)
    return loss.detach(), grad.squeeze(1)
