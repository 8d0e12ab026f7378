"""Fused head GEMM and cross-entropy: logits exist for a chunk of tokens at a time.

In training, forward also computes the gradients. Per chunk, with logits Z = X W^T [t, n]:

    loss += cross_entropy(Z)        dZ = softmax(Z) - onehot(labels), in place of Z
    dX = dZ W    saved for backward                dW += dZ^T X    into the main gradient

Backward returns the saved gradients. The gradient of the loss must therefore be 1, as for a sum of losses.

A chunk has the collectives of a column-parallel layer. With sequence parallelism a chunk is the same rows of every
rank's shard: the all-gather of X overlaps with the logits' GEMM, and the reduce-scatter of dX with wgrad.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce, labelled_pieces
from megascale.layout.loss import loss_chunks
from megascale.ops.cross_entropy import CrossEntropy, Targets
from megascale.ops.distillation import Distillation, SoftLabels
from megascale.parallel.grad_accumulation import accumulate_wgrad
from megascale.parallel.linear_gemms import WeightOperand
from megascale.parallel.tp_overlap import TensorParallel, all_gather_matmul
from megascale.parallel.vocabulary import VocabularyRange
from megascale.record.label import FORWARD, Label

LABEL = Label("head", direction=FORWARD)  # event label of the head's collectives


def linear_cross_entropy(
    x_sbh: Tensor,
    weight: Tensor,
    labels_sb: Tensor,
    mask_sb: Tensor | None,
    vocabulary: VocabularyRange,
    tp: TensorParallel,
    cross_entropy: CrossEntropy,
    soft: SoftLabels | None = None,
) -> Tensor:
    """Sum -log softmax(x W^T)[label] over the tokens whose mask is 1; a scalar in fp32 or wider.

    x [s, b, h], or [s / tp, b, h] with sequence parallelism; weight [rows, h] of this rank; labels [s, b], global ids.
    If gradients are enabled, backward must follow, with an output gradient of 1. With `soft` labels the result is [2]:
    this sum, whose gradient is that of the loss with a teacher, and the sum of the KL, which is no term of the loss.
    """
    options = _LossOptions(vocabulary, tp, cross_entropy, torch.is_grad_enabled(), soft)
    return _LinearCrossEntropy.apply(x_sbh, weight, labels_sb, mask_sb, options)


@dataclass(frozen=True)
class _LossOptions:
    vocabulary: VocabularyRange
    tp: TensorParallel
    cross_entropy: CrossEntropy
    compute_grad: bool
    soft: SoftLabels | None = None

    def targets(self, labels: Tensor, mask: Tensor | None, rows: slice, wide: torch.dtype) -> Targets:
        """Return the targets of the tokens in `rows` of every rank's shard."""
        own = None if mask is None else self._tokens(mask, rows)
        return self.vocabulary.targets(self._tokens(labels, rows), own, wide)

    def function(self, rows: slice, wide: torch.dtype) -> CrossEntropy:
        """Return the function of the logits of these tokens that is the loss."""
        if (soft := self.soft) is None:
            return self.cross_entropy
        columns = self._tokens(soft.ids, rows).long() - self.vocabulary.start
        remote = (columns < 0) | (columns >= self.vocabulary.valid)
        shares = self._tokens(soft.log_probs, rows).to(wide).softmax(-1).masked_fill_(remote, 0)
        columns.masked_fill_(remote, 0)
        return Distillation(**vars(self.cross_entropy), columns=columns, shares=shares, alpha=soft.alpha)

    def loss(
        self, x: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the sum of the losses, with a teacher both sums, the gradient of x, and the weight's gradient (None
        with `main_grad`).
        """
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        grads: list[Tensor] = []
        grad_weight: Tensor | None = None
        chunks = loss_chunks(x.shape[0], labels.numel(), weight.shape[0])
        for rows, label in labelled_pieces(x.shape[0], chunks, LABEL):
            targets = self.targets(labels, mask, rows, total.dtype)
            loss, grad_x, wgrad = self.chunk_loss(x[rows], weight, self.function(rows, total.dtype), targets, label)
            total = total + loss
            if grad_x is not None:
                grads.append(grad_x)
            if wgrad is not None:
                grad_weight = wgrad if grad_weight is None else grad_weight.add_(wgrad)
        return total, torch.cat(grads) if len(grads) > 1 else next(iter(grads), None), grad_weight

    def chunk_loss(
        self, x: Tensor, weight: Tensor, function: CrossEntropy, targets: Targets, label: Label
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the loss of a chunk of x, the gradient of the chunk, and the weight's gradient, as `loss` does."""
        full, (logits,) = all_gather_matmul(x, [WeightOperand(weight)], self.tp, label, x.dtype)
        assert isinstance(full, Tensor), "the head is not FP8"
        reduce = partial(all_reduce, self.tp.group)
        loss, grad = function(logits.flatten(0, 1), targets, reduce, self.compute_grad)
        if grad is None:
            return loss, None, None
        grad_x = (grad @ weight).view(full.shape)
        grad_x, reducing = self.tp.reduce(grad_x, label.for_backward("gradient"), wait=not self.tp.overlap)
        wgrad = accumulate_wgrad(weight, grad, full.flatten(0, 1))
        reducing.wait()
        return loss, grad_x, wgrad

    def _tokens(self, values_sb: Tensor, rows: slice) -> Tensor:
        """Return the values [t, ...] of the tokens in `rows` of every rank's shard, of [s, b, ...]."""
        shards = self.tp.size if self.tp.activations_sharded else 1
        return values_sb.unflatten(0, (shards, -1))[:, rows].flatten(0, 2)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None, options: _LossOptions
    ) -> Tensor:
        with options.tp.group.recorder.memory_kind("logits"):
            total, *grads = options.loss(x, weight, labels, mask)
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        torch._assert_async(
            grads[0].view(-1)[0] == 1,
            "the gradient of the loss is not 1; divide gradients by the token count after backward",
        )
        return *ctx.saved_tensors, None, None, None
