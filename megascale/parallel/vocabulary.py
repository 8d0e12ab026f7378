"""The vocabulary cut over tensor parallelism, and the token embedding.

The rows are padded so that every rank has as many (`layout.tensors.padded_vocab`). Padding rows stay zero: no token
looks them up, and their logits do not enter the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.core.label import FORWARD, Label
from megascale.ops.embedding import lookup
from megascale.parallel.overlap import TensorAxis
from megascale.parallel.weights import add_rows

LABEL = Label("embedding", direction=FORWARD)
"""What the collectives of the embedding concern."""


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
        return axis.reduce(out, LABEL)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        local, foreign, weight = ctx.saved_tensors
        grad, _ = ctx.axis.gather(grads[0].contiguous(), LABEL.backward("gradient"))
        if foreign is not None:
            grad = grad.masked_fill(foreign.unsqueeze(-1), 0)
        return None, add_rows(weight, local.view(-1), grad.view(-1, grad.shape[-1])), None, None
