"""The samples of a step on one rank, as micro-batches: the data that pipeline stages read beside the activations; and
what a stage returns for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from megascale.layout.sequence_shard import SequenceShard
from megascale.ops.boundaries import Boundaries
from megascale.ops.distillation import SoftLabels
from megascale.parallel.rng import Dropout

if TYPE_CHECKING:
    from megascale.parallel.experts.dispatcher import ExpertChoice
    from megascale.parallel.kv_store import KVStore


@dataclass
class DepthTargets:
    """The targets of a depth of multi-token prediction: `labels` [s, b], i64, one token further ahead than the depth
    before. `weights` [s, b], f64: as `MicroBatch.mask`, and 0 where the label lies beyond the document or the sample;
    `count`: their sum. In training `constant`, of the term of the loss.
    """

    labels: Tensor
    weights: Tensor
    count: float
    constant: Tensor | None = None


@dataclass
class ObjectiveTargets:
    """The terms of an auxiliary objective: for each the row of the micro-batch [n] and the places in it [n, k], i64, of
    this rank's part of the sequence, -1 in another's. `loss`: their sum, of the hidden states [n, k, h]. `count`: n,
    and 0 where another rank that shares the sequences counts them. In training `constant`, of the term of the loss.
    """

    loss: Callable[[Tensor], Tensor]
    rows: Tensor
    places: Tensor
    count: float
    constant: Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Tokens and labels [s, b], i64, on the stages that need them; `mask` [s, b] is 1 where a label counts in the loss,
    or the label's weight, None if all labels count. `boundaries`: of documents, on every stage, with
    `data.attention_mask = "document"`. `shard`: the positions of these tokens, on every stage, if ranks share a
    sequence, or if they are a chunk of it; `boundaries` are those of whole sequences. `keys`: shared by the chunks of a
    sequence. `loss_tokens`: the number of labels that count, or the sum of their weights, and `sequence_loss_tokens`
    those of all ranks that share the sequences; zero on ranks that read no tokens. `planned_rows`: the number of
    tokens, on every stage, if a planner has chosen it for this micro-batch. `expert_choices`: by layer the experts that
    tokens have chosen. `depths`: of multi-token prediction, on the last stage in training. `exits`: by the number of
    layers before them the weights of early exits' losses, in training. `logit_radius`: of the box around the logits at
    whose worst point an evaluation takes the loss (`ops.cross_entropy`). `further_losses`: of this rank's stages, as in
    `StageOutput.further`, and the sums of distillation and of objectives that it counts.
    """

    tokens: Tensor | None
    labels: Tensor | None
    mask: Tensor | None
    dropout: Dropout
    boundaries: Boundaries | None = None
    shard: SequenceShard | None = None
    keys: KVStore | None = None
    loss_tokens: float = 0
    sequence_loss_tokens: float = 0
    planned_rows: int | None = None
    expert_choices: dict[int, ExpertChoice] = field(default_factory=dict)
    depths: tuple[DepthTargets, ...] = ()
    exits: dict[int, float] = field(default_factory=dict)
    logit_radius: float = 0.0
    further_losses: dict[str, Tensor] = field(default_factory=dict)
    teacher: SoftLabels | None = None
    objectives: dict[str, ObjectiveTargets] = field(default_factory=dict)

    @property
    def counted_terms(self) -> list[DepthTargets | ObjectiveTargets]:
        """The terms of the loss whose mean is over a count of their own: of depths, then of objectives."""
        return [*self.depths, *self.objectives.values()]

    @cached_property
    def halves(self) -> tuple[MicroBatch, ...]:
        """The first and the second half of the rows, with what layers read of a micro-batch."""
        count = len(self.dropout.samples) // 2
        return tuple(
            replace(
                self, dropout=self.dropout.of_rows(rows), boundaries=self.boundaries and self.boundaries.of_rows(rows)
            )
            for rows in (slice(0, count), slice(count, None))
        )

    def release(self, *, forward_only: bool = False) -> None:
        """Free what layers have shared for this micro-batch, after its last use. `forward_only`: in an evaluation, no
        backward frees the keys of chunks.
        """
        self.release_masks()
        for choice in self.expert_choices.values():
            choice.release()
        if forward_only and self.keys is not None and self.shard is not None and self.shard.is_last:
            self.keys.clear()

    def release_masks(self) -> None:
        """Free the masks of documents, which the next use makes again."""
        if self.boundaries is not None:
            self.boundaries.release()
            for half in self.__dict__.get("halves", ()):
                half.release_masks()


class StageOutput(NamedTuple):
    """The activation for the next stage, None of the last, and the terms that this stage adds to the loss: to the
    `loss` that a step reports, and `further` ones by module. A term is a scalar, a sum over this rank's tokens of a
    micro-batch times a constant, equal on all ranks and in all micro-batches of a step.

    Gradients are sums of all terms, divided once by the labels of the step, when they are clipped. The cross-entropy of
    these labels therefore has the constant 1; a mean over n others, weighted by a, has a x labels / n.
    """

    activation: Tensor | None
    loss: Tensor | None = None
    further: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of a step on this rank."""

    micro_batches: Sequence[MicroBatch]

    @property
    def sequences(self) -> list[MicroBatch]:
        """The micro-batches with the first tokens of their sequences."""
        return [part for part in self.micro_batches if part.shard is None or part.shard.index == 0]

    @property
    def loss_tokens(self) -> float:
        """The number of labels that count in the loss, or the sum of their weights; zero on ranks without tokens."""
        return sum(micro_batch.loss_tokens for micro_batch in self.micro_batches)
