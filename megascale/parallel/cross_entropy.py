"""The head's product and the cross-entropy in one: logits exist for a chunk of tokens at a time.

Where a backward will follow, the forward already turns the logits of a chunk into their gradient and uses it up: the
input's gradient is kept for the backward instead of the input, and the weight's is added to where it accumulates. So
the gradient of the loss itself must be one, as that of a sum of losses is.

Each chunk has the collectives of a column-parallel layer. With sequence parallelism it is the same rows of every rank's
part: its input is gathered under its own product, and its gradient summed under the one that gives the weight's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce, labelled
from megascale.core.label import FORWARD, Label
from megascale.layout.loss import loss_chunks
from megascale.ops.cross_entropy import CrossEntropy, Targets
from megascale.parallel.numerics import Factor
from megascale.parallel.overlap import TensorAxis, gathered_products
from megascale.parallel.vocabulary import VocabularyRange
from megascale.parallel.weights import add_product

LABEL = Label("head", direction=FORWARD)
"""What the collectives of the head concern."""


def linear_cross_entropy(
    x_sbh: Tensor,
    weight: Tensor,
    labels_sb: Tensor,
    mask_sb: Tensor | None,
    vocabulary: VocabularyRange,
    axis: TensorAxis,
    cross_entropy: CrossEntropy,
) -> Tensor:
    """Sum over tokens of -log softmax(x W^T)[label], where mask is 1; a scalar in fp32 or wider.

    x [s, b, h], or [s / tp, b, h] with sequence parallelism; weight [rows, h] is this rank's; labels [s, b] are global
    ids. Where gradients are enabled a backward must follow, and with a gradient of one.
    """
    how = _How(vocabulary, axis, cross_entropy, torch.is_grad_enabled())
    return _LinearCrossEntropy.apply(x_sbh, weight, labels_sb, mask_sb, how)


@dataclass(frozen=True)
class _How:
    vocabulary: VocabularyRange
    axis: TensorAxis
    cross_entropy: CrossEntropy
    gradient: bool

    def targets(self, labels: Tensor, mask: Tensor | None, rows: slice, wide: torch.dtype) -> Targets:
        """Of the tokens that stand in `rows` of every rank's part."""
        columns = self._tokens(labels, rows) - self.vocabulary.start
        weights = torch.ones_like(columns, dtype=wide) if mask is None else self._tokens(mask, rows).to(wide)
        return Targets(columns, weights, self.vocabulary.valid)

    def loss(
        self, x: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The sum of the losses, and the gradients of x, and of the weight unless it has a place."""
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        grads: list[Tensor] = []
        grad_weight: Tensor | None = None
        chunks = loss_chunks(x.shape[0], labels.numel(), weight.shape[0])
        for rows, what in labelled(x.shape[0], chunks, LABEL):
            loss, grad_x, product = self.chunk(x[rows], weight, self.targets(labels, mask, rows, total.dtype), what)
            total += loss
            if grad_x is not None:
                grads.append(grad_x)
            if product is not None:
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        return total, torch.cat(grads) if len(grads) > 1 else next(iter(grads), None), grad_weight

    def chunk(
        self, x: Tensor, weight: Tensor, targets: Targets, what: Label
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The loss of a part of x, and the gradients of that part, and of the weight unless it has a place."""
        full, (logits,) = gathered_products(x, [Factor(weight)], self.axis, what, x.dtype)
        assert isinstance(full, Tensor), "the head multiplies as its tensors are"
        reduce = partial(all_reduce, self.axis.group)
        loss, grad = self.cross_entropy(logits.flatten(0, 1), targets, reduce, self.gradient)
        if grad is None:
            return loss, None, None
        grad_x = (grad @ weight).view(full.shape)
        grad_x, reducing = self.axis.reduce(grad_x, what.backward("gradient"), wait=not self.axis.overlap)
        product = add_product(weight, grad, full.flatten(0, 1))
        reducing.wait()
        return loss, grad_x, product

    def _tokens(self, numbers_sb: Tensor, rows: slice) -> Tensor:
        parts = self.axis.size if self.axis.cut else 1
        return numbers_sb.unflatten(0, (parts, -1))[:, rows].reshape(-1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None, how: _How) -> Tensor:
        with how.axis.group.recorder.memory("logits"):
            total, *grads = how.loss(x, weight, labels, mask)
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        torch._assert_async(grads[0] == 1, "the gradient of a loss is one: sums are divided after the backward")
        return *ctx.saved_tensors, None, None, None
