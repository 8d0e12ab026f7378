"""The vocabulary cut over tensor parallelism: token embedding and cross-entropy, neither of which forms a whole row.

The rows are padded so that every rank has as many (`layout.tensors.padded_vocab`). Padding rows stay zero: no token
looks them up, and their logits do not enter the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.ops.embedding import lookup
from megascale.parallel.overlap import TensorAxis
from megascale.parallel.weights import add_rows


@dataclass(frozen=True)
class VocabularyRange:
    """The tokens of one rank: `start` is the first, `rows` as many as the weight has, `valid` those that are real."""

    start: int
    rows: int
    valid: int

    @classmethod
    def of(cls, vocab_size: int, padded: int, axis: TensorAxis) -> VocabularyRange:
        rows = padded // axis.size
        start = axis.index * rows
        return cls(start, rows, min(max(vocab_size - start, 0), rows))


def embed(ids_sb: Tensor, weight: Tensor, vocabulary: VocabularyRange, axis: TensorAxis) -> Tensor:
    """Rows of the embedding for ids [s, b]; weight [rows, h] is this rank's. Result [s, b, h], or [s / tp, b, h] with
    sequence parallelism.
    """
    return _Embed.apply(ids_sb, weight, vocabulary, axis)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, vocabulary: VocabularyRange, axis: TensorAxis) -> Tensor:
        local = ids - vocabulary.start
        foreign = None
        if axis.size > 1:
            foreign = (local < 0) | (local >= vocabulary.rows)
            local = local.masked_fill(foreign, 0)
        ctx.save_for_backward(local, foreign, weight)
        ctx.axis = axis
        out = lookup(weight, local)
        if foreign is not None:
            out.masked_fill_(foreign.unsqueeze(-1), 0)
        return axis.reduce(out, "embedding")[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        local, foreign, weight = ctx.saved_tensors
        grad, _ = ctx.axis.gather(grads[0].contiguous(), "embedding gradient")
        if foreign is not None:
            grad = grad.masked_fill(foreign.unsqueeze(-1), 0)
        return None, add_rows(weight, local.view(-1), grad.view(-1, grad.shape[-1])), None, None


def cross_entropy_sum(
    logits: Tensor, labels_sb: Tensor, mask_sb: Tensor | None, vocabulary: VocabularyRange, axis: TensorAxis
) -> Tensor:
    """Sum over tokens of -log softmax(logits)[label], where mask is 1; a scalar in fp32 or wider.

    logits [s, b, rows] are this rank's columns and are overwritten; labels [s, b] are global ids. Ranks exchange the
    largest logit, and the sum of exponentials with the label's logit: three numbers a token.
    """
    return _CrossEntropy.apply(logits, labels_sb, mask_sb, vocabulary, axis)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, mask: Tensor | None, vocabulary: VocabularyRange, axis: TensorAxis
    ) -> Tensor:
        scores = logits.detach().view(-1, logits.shape[-1])
        ctx.format = scores.dtype
        if scores.dtype in (torch.bfloat16, torch.float16):
            scores = scores.float()
        scores[:, vocabulary.valid :] = -math.inf
        local = labels.reshape(-1) - vocabulary.start
        mine = (local >= 0) & (local < vocabulary.valid)
        local = local.masked_fill(~mine, 0)

        peak = scores.amax(-1)
        all_reduce(axis.group, peak, "max", what="loss peak")
        scores -= peak.unsqueeze(-1)
        own = scores.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill_(~mine, 0)
        scores.exp_()
        sums = torch.stack([scores.sum(-1), own])
        all_reduce(axis.group, sums, what="loss sums")
        total, chosen = sums.unbind()
        losses = total.log() - chosen

        weights = mask.reshape(-1).to(scores.dtype) if mask is not None else torch.ones_like(losses)
        ctx.exponentials = scores  # overwritten in the backward, which is why autograd does not keep them
        ctx.save_for_backward(local, mine, total, weights)
        ctx.shape = logits.shape
        return (losses * weights).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        local, mine, total, weights = ctx.saved_tensors
        exponentials, ctx.exponentials = ctx.exponentials, None
        scale = weights * grads[0]
        grad = exponentials.mul_((scale / total).unsqueeze(-1))  # softmax, then minus one at the label
        grad.scatter_add_(1, local.unsqueeze(1), -(scale * mine).unsqueeze(1))
        return grad.view(ctx.shape).to(ctx.format), None, None, None, None
