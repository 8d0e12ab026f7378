"""Vocabulary parallelism: the token embedding with vocabulary rows sharded over tp, or over tp and pp.

The number of rows is padded to a multiple of the shards (`layout.tensors.padded_vocab`). Padding rows stay zero: no
token looks them up, and their logits do not enter the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.config.model import ModelConfig
from megascale.layout.tensors import padded_vocab
from megascale.ops.cross_entropy import Targets
from megascale.ops.embedding_rows import lookup
from megascale.parallel.grad_accumulation import accumulate_embedding_grad
from megascale.parallel.tp_overlap import TensorParallel
from megascale.record.label import FORWARD, Label

LABEL = Label("embedding", direction=FORWARD)  # event label of the embedding's collectives


@dataclass(frozen=True)
class VocabularyRange:
    """The vocabulary rows of one rank: the first token id `start`, `rows` in all, of which `valid` are not padding.
    `shared`: other ranks have others.
    """

    start: int
    rows: int
    valid: int
    shared: bool = False

    @classmethod
    def for_rank(cls, model: ModelConfig, index: int, ranks: int) -> VocabularyRange:
        rows = padded_vocab(model, ranks) // ranks
        start = index * rows
        return cls(start, rows, min(max(model.vocab_size - start, 0), rows), ranks > 1)

    def targets(self, labels: Tensor, mask: Tensor | None, wide: torch.dtype) -> Targets:
        """Return the targets of tokens from their labels [t], global ids, and their mask; `wide`: dtype of the loss."""
        weights = torch.ones_like(labels, dtype=wide) if mask is None else mask.to(wide)
        return Targets(labels - self.start, weights, self.valid)


def vocab_parallel_embedding(ids_sb: Tensor, weight: Tensor, vocabulary: VocabularyRange, tp: TensorParallel) -> Tensor:
    """Look up ids [s, b] in an embedding sharded over tp, weight [rows, h] on this rank.

    The result is [s, b, h], or [s / tp, b, h] with sequence parallelism. A rank contributes zeros for ids of other
    ranks; the reduction over tp adds the contributions, and if pp shares the rows too, the caller those along pp.
    """
    return _Embed.apply(ids_sb, weight, vocabulary, tp)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, vocabulary: VocabularyRange, tp: TensorParallel) -> Tensor:
        local = ids - vocabulary.start
        remote = None  # ids in another rank's range
        if vocabulary.shared:
            remote = (local < 0) | (local >= vocabulary.rows)
            local = local.masked_fill(remote, 0)
        ctx.save_for_backward(local, remote)
        ctx.weight, ctx.tp = weight, tp  # itself: a saved weight that hooks restore has no main gradient
        out = lookup(weight, local)
        if remote is not None:
            out.masked_fill_(remote.unsqueeze(-1), 0)
        return tp.reduce(out, LABEL)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        local, remote = ctx.saved_tensors
        grad, _ = ctx.tp.gather(grads[0].contiguous(), LABEL.for_backward("gradient"))
        if remote is not None:
            grad = grad.masked_fill(remote.unsqueeze(-1), 0)
        return None, accumulate_embedding_grad(ctx.weight, local.view(-1), grad.view(-1, grad.shape[-1])), None, None
