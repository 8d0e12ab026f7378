"""A pipeline stage of the transformer: the embedding on the first stage, layers with early exits, the head and loss on
the last.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from megascale.catalog.layers import BLOCKS
from megascale.catalog.objectives import DISTILLATION
from megascale.layout.recompute_policy import NO_RECOMPUTE, RecomputePolicy
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, exit_name
from megascale.model.block import SteppedBlock
from megascale.model.embedding import Embedding
from megascale.model.modules import LayerContext, Norm
from megascale.model.prediction import PredictionLayer
from megascale.parallel.auxiliary_objectives import objective_losses
from megascale.parallel.domino import in_halves
from megascale.parallel.linear_cross_entropy import linear_cross_entropy
from megascale.parallel.microbatch import MicroBatch, StageOutput
from megascale.parallel.recompute import recompute_in_backward
from megascale.parallel.segments import Steps, beside, finish
from megascale.parallel.vocabulary import VocabularyRange


class Head(nn.Module):
    """The final norm, the projection to the vocabulary, and the loss. The weight may be tied to the token embedding;
    without it, in vocabulary parallelism over pp, there is only the norm (`parallel.vocabulary_passes`). `after`: the
    number of layers before an early exit, which has a norm and a weight of its own.
    """

    def __init__(self, context: LayerContext, vocabulary: VocabularyRange, after: int = 0) -> None:
        super().__init__()
        name, tied = exit_name(after), TOKEN_EMBEDDING if context.model.tie_embeddings else HEAD
        self.norm = Norm(context, f"{name}.norm" if after else "final_norm")
        weight = f"{name}.{HEAD}" if after else tied
        if weight in context.parameters:
            self.weight = context.parameters[weight]
        self._after = after
        self._vocabulary = vocabulary
        self._tp = context.tp
        self._cross_entropy = context.operators.cross_entropy

    def forward(self, x_sbh: Tensor, batch: MicroBatch, depth: int = 0) -> Tensor:
        """Compute the loss of the normed x, summed over the micro-batch's tokens; of a `depth` of multi-token
        prediction, from 1, times its constant. An early exit norms x itself; its loss is times its weight. A teacher
        adds to the gradient of the loss of the next token, and the KL is left in the micro-batch.
        """
        if batch.labels is None:
            raise ValueError("a stage with a head needs labels")
        labels, weights = batch.labels, batch.mask
        if depth:
            targets = batch.depths[depth - 1]
            assert targets.constant is not None, "a step counts the targets of each depth"
            labels, weights = targets.labels, targets.weights * targets.constant
        if self._after:
            counted = torch.ones_like(labels) if weights is None else weights
            x_sbh, weights = self.norm(x_sbh), counted.double() * batch.exits[self._after]
        cross_entropy = self._cross_entropy.in_box(batch.logit_radius)
        soft = None if depth or self._after else batch.teacher
        losses = linear_cross_entropy(
            x_sbh, self.weight, labels, weights, self._vocabulary, self._tp, cross_entropy, soft
        )
        if soft is None:
            return losses
        batch.further_losses[DISTILLATION] = losses[1].detach()
        return losses[0]


class Stage(nn.Module):
    """One virtual pipeline stage: maps the previous stage's activation to the next activation, or to the losses.

    The first stage takes None and reads the tokens; in vocabulary parallelism over pp it takes their embeddings, and
    the last stage returns its normed activation. `bucket_boundary` is called with (module name, module input) before
    every layer and the head, and returns the input (`parallel.param_and_grad_buffers`). `policy`: of a layer's number,
    what it recomputes.
    """

    def __init__(
        self,
        context: LayerContext,
        layers: range,
        first: bool,
        last: bool,
        bucket_boundary: Callable[[str, Tensor], Tensor] = lambda unit, x: x,
        policy: Callable[[int], RecomputePolicy] = lambda layer: NO_RECOMPUTE,
    ) -> None:
        super().__init__()
        self._bucket_boundary = bucket_boundary
        self._policies = {str(index): policy(index) for index in layers}
        self._store = context.store
        model, tp = context.model, context.tp
        self._layers_in_halves = tp.domino and not any(each.whole for each in self._policies.values())
        vocabulary = VocabularyRange.for_rank(model, tp.index, tp.size)
        self.embedding = Embedding(context, vocabulary) if first else None
        block, own = BLOCKS[model.block].load(), lambda index: replace(context, recompute=policy(index))
        trunk = [index for index in layers if index < model.num_layers]
        self.layers = nn.ModuleDict({str(index): block(own(index), index) for index in trunk})
        self.exits = nn.ModuleDict(
            {str(index): Head(context, vocabulary, index + 1) for index in trunk if index + 1 in model.exits}
        )
        self.head = Head(context, vocabulary) if last else None
        self.ends_in_loss = self.head is not None and hasattr(self.head, "weight")
        self._tp, self._cp = tp, context.cp
        deeper = [PredictionLayer(own(index), index, vocabulary) for index in layers[len(trunk) :]]
        self.predictions = nn.ModuleDict({str(layer.index): layer for layer in deeper})

    def _layer_steps(
        self, x_sbh: Tensor, batch: MicroBatch, leads: bool, losses: dict[str, Tensor] | None = None, cut: bool = True
    ) -> Steps[Tensor]:
        """Run all layers: recomputed ones, and unless `cut` all, in a step as modules, with their hooks. Of two halves
        the leading one is the first in a layer, and in backward the last to leave it. `losses`: gets those of early
        exits, for which an evaluation has no weights; a segment passes on those before it.
        """
        exits = set(self.exits) if batch.exits or torch.is_grad_enabled() else set()
        for index, block in self.layers.items():
            x_sbh = self._bucket_boundary(f"layers.{index}", x_sbh) if leads else x_sbh
            if cut and isinstance(block, SteppedBlock) and not self._policies[index].whole:
                x_sbh = yield from beside(losses or {}, block.steps(x_sbh, batch))
            else:
                x_sbh = self._run_block(index, block, x_sbh, batch)
            if losses is not None and index in exits:
                name = exit_name(int(index) + 1)
                x_sbh = self._bucket_boundary(name, x_sbh)
                losses[name] = self.exits[index](x_sbh, batch)
        return x_sbh

    def _run_block(self, index: str, block: nn.Module, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        policy = self._policies[index]
        moving: AbstractContextManager[None] = nullcontext()
        if self._store is not None and policy.store != "device" and torch.is_grad_enabled():
            moving = self._store.moving(policy.store, x_sbh, block.parameters())
        with moving:
            if not policy.full:
                return block(x_sbh, batch)
            return recompute_in_backward(
                lambda x: block(x, batch), x_sbh, recompute=lambda x: block(x, batch, compute_output=False)
            )

    def forward(self, x_sbh: Tensor | None, batch: MicroBatch) -> StageOutput:
        return finish(self.steps(x_sbh, batch, cut=False))

    def steps(self, x_sbh: Tensor | None, batch: MicroBatch, cut: bool = True) -> Steps[StageOutput]:
        """Compute the activation for the next stage and the losses, in segments (`parallel.segments`) if `cut`."""
        further = dict[str, Tensor]()
        if self.embedding is not None:
            if batch.tokens is None:
                raise ValueError("the first stage needs tokens")
            x_sbh = self.embedding(batch.tokens, batch, rows_sbh=x_sbh)
        assert x_sbh is not None, "a stage after the first is given the activation of the one before it"
        if self._layers_in_halves:
            x_sbh = in_halves(self._layer_steps, x_sbh, batch)
        else:
            x_sbh = yield from self._layer_steps(x_sbh, batch, leads=True, losses=further, cut=cut)
        if self.head is None:
            return StageOutput(x_sbh, None, further)
        x_sbh = self.head.norm(self._bucket_boundary("head", x_sbh))
        further |= objective_losses(x_sbh, batch, self._tp, self._cp)
        if not self.ends_in_loss:
            return StageOutput(x_sbh, None, further)
        loss = self.head(x_sbh, batch)
        deeper = zip(batch.depths, self.predictions.items(), strict=torch.is_grad_enabled())  # an evaluation has none
        for depth, (_, (index, layer)) in enumerate(deeper, start=1):
            x_sbh = self._run_block(index, layer, self._bucket_boundary(f"layers.{index}", x_sbh), batch)
            further[f"layers.{index}"] = self.head(x_sbh, batch, depth=depth)
        return StageOutput(None, loss, further)
