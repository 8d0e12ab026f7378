"""The passes of vocabulary parallelism over pp, on one rank (`schedule.shared_vocabulary` has their order).

With logits Z = X W^T [t, n] of this rank's rows W [n, h], and factors c [t] that make E the softmax over all ranks:

    two barriers   VS: Z, statistics    VT: G = softmax(Z) - onehot(labels), dX = G W, dW += G^T X
    one barrier    VS: Z, statistics, E = e^(Z - max Z), E W    HIDDEN_GRAD: dX = c E W - W[labels]
                                                                VT: dW += E^T (c X), less X at the labels' rows

Every dX is this rank's part, and HIDDEN_GRAD sums them. What the stages at the ends of the pipeline make is given to
the passes, and what they need is taken from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megascale.comm.collectives import all_gather, all_reduce
from megascale.comm.group import Group
from megascale.comm.work import COMPLETED, Work
from megascale.ops.cross_entropy import CrossEntropy, Statistics, Targets, soft_cap_derivative
from megascale.parallel.activation_messages import P2PActivationSpec
from megascale.parallel.grad_accumulation import accumulate_embedding_grad, accumulate_wgrad
from megascale.parallel.linear_cross_entropy import LABEL
from megascale.parallel.linear_gemms import WeightOperand
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.param_and_grad_buffers import ParamAndGradBuffers
from megascale.parallel.recompute import run_backward
from megascale.parallel.tp_overlap import TensorParallel, all_gather_matmul
from megascale.parallel.vocabulary import VocabularyRange, vocab_parallel_embedding
from megascale.record.label import Label
from megascale.schedule.ir import Action, Kind


@dataclass
class StageSums:
    """Sums over the stages by micro-batch, of tensors of the format of activations. A stage that was given no tensor
    adds zeros: a sum with one given tensor spreads it. `used`: this rank takes the sums; else it only ends them.
    """

    group: Group
    spec: P2PActivationSpec
    label: Label
    used: bool = True
    given: dict[int, Tensor] = field(default_factory=dict)
    started: dict[int, tuple[Work, Tensor]] = field(default_factory=dict)

    def start(self, index: int) -> None:
        self.end_unused()
        spec, given = self.spec, self.given.pop(index, None)
        part = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device) if given is None else given.clone()
        self.started[index] = all_reduce(self.group, part, label=self.label, wait=False), part

    def take(self, index: int) -> Tensor:
        """Wait for a sum."""
        work, total = self.started.pop(index)
        work.wait()
        return total

    def end_unused(self) -> None:
        """Wait for the sums that this rank does not take."""
        for index in () if self.used else list(self.started):
            self.take(index)


@dataclass
class _Logits:
    """A micro-batch between VS and VT: `x` [s, b, h]; `logits` [t, n], with one barrier E; `statistics` of this rank,
    and of all ranks [ranks x 3, t], with their exchange; `product`: E W.
    """

    x: Tensor
    logits: Tensor
    targets: Targets
    own: Statistics
    parts: Tensor
    exchange: Work = COMPLETED
    product: Tensor | None = None

    def statistics(self) -> Statistics:
        """Wait for the statistics of all ranks."""
        self.exchange.wait()
        return Statistics.of_ranks(self.parts.view(-1, *torch.stack(self.own).shape))


@dataclass
class VocabularyPasses:
    """The passes of a rank over its rows of the embedding and of the head, a `chunk` in `buffers`. `ranks`: all that
    share the rows, along tp and pp; `wide`: dtype of the loss. Sums over the stages: of embeddings, `embedded`, of the
    last stage's output, `hidden`, and of their gradients.
    """

    chunk: int
    buffers: ParamAndGradBuffers
    embedding: nn.Parameter
    head: nn.Parameter
    vocabulary: VocabularyRange
    tp: TensorParallel
    ranks: Group
    cross_entropy: CrossEntropy
    barriers: int
    wide: torch.dtype
    embedded: StageSums
    embedded_grads: StageSums
    hidden: StageSums
    hidden_grads: StageSums
    _edges: dict[int, GradientEdge] = field(default_factory=dict, init=False)
    _logits: dict[int, _Logits] = field(default_factory=dict, init=False)

    def run(self, action: Action, batch: MicroBatch, *, training: bool) -> Tensor | None:
        """Run a pass, or start an exchange. VT of the rank with the last stage returns the loss, a sum over tokens."""
        kind, chunk, index = action
        match kind:
            case Kind.EMBED:
                assert batch.tokens is not None, "every stage reads the tokens"
                found = vocab_parallel_embedding(batch.tokens, self.embedding, self.vocabulary, self.tp)
                if found.requires_grad:
                    self._edges[index] = get_gradient_edge(found)
                self.embedded.given[index] = found.detach()
                self.embedded.start(index)
            case Kind.HIDDEN:
                self.hidden.start(index)
            case Kind.VS:
                self._compute_logits(index, batch, training=training)
            case Kind.STATS:  # the barrier
                state, label = self._logits[index], LABEL.with_suffix("statistics")
                own = torch.stack(state.own)
                state.exchange = all_gather(self.ranks, state.parts, own, label=label, wait=False)
            case Kind.VT:
                with self.buffers.backward(chunk, last=False):
                    loss = self._compute_gradients(index, training=training)
                return loss if self.hidden_grads.used else None
            case Kind.HIDDEN_GRAD:
                if self.barriers == 1:
                    self._scale_gradient(index)
                self.hidden_grads.start(index)
            case Kind.EMBED_GRAD:
                self.add_embedding_gradients()
                self.embedded_grads.start(index)
        return None

    def give(self, action: Action, result: Tensor) -> None:
        """Give the result of the last stage's F, or of the first stage's B."""
        sums = self.hidden if action.kind is Kind.F else self.embedded_grads
        sums.given[action.microbatch] = result

    def take(self, action: Action) -> Tensor:
        """Wait for the input of the first stage's F, or for the gradient that the last stage's B needs."""
        return (self.embedded if action.kind is Kind.F else self.hidden_grads).take(action.microbatch)

    def add_embedding_gradients(self) -> None:
        """Add the gradients that have been spread to the rows: before the next, and before their reduction."""
        with self.buffers.backward(self.chunk, last=False):
            for index in list(self.embedded_grads.started):
                edge, grad = self._edges.pop(index, None), self.embedded_grads.take(index)
                if edge is not None:  # none of a frozen embedding
                    run_backward([edge], [grad])

    def finish(self) -> None:
        """End all exchanges of a step or an evaluation."""
        self.embedded.end_unused()
        self.hidden_grads.end_unused()

    @torch.no_grad()
    def _compute_logits(self, index: int, batch: MicroBatch, *, training: bool) -> None:
        """Run VS."""
        assert batch.labels is not None, "every stage reads the labels"
        operands, kernels = [WeightOperand(self.head)], self.cross_entropy.in_box(batch.logit_radius)
        x, (out,) = all_gather_matmul(self.hidden.take(index), operands, self.tp, LABEL, self.head.dtype)
        assert isinstance(x, Tensor), "the head is not FP8"
        logits, mask = out.flatten(0, 1), None if batch.mask is None else batch.mask.flatten()
        targets = self.vocabulary.targets(batch.labels.flatten(), mask, self.wide)
        own = kernels.local_statistics(logits, targets)
        parts = own.peak.new_empty(3 * self.ranks.size, len(own.peak))
        state = self._logits[index] = _Logits(x, logits, targets, own, parts)
        if training and self.barriers == 1:
            ones, zeros = torch.ones_like(own.peak), torch.zeros_like(own.peak)
            kernels.gradient(logits, targets.local_columns, own.peak, ones, zeros, kernels.cap)
            state.product = logits @ self.head

    @torch.no_grad()
    def _scale_gradient(self, index: int) -> None:
        """Make the gradient of the last stage's output of what VS has computed."""
        state = self._logits[index]
        scale = self.cross_entropy.softmax_scale(state.targets, state.own.peak, state.statistics())
        rows = self.head[state.targets.local_columns]
        assert state.product is not None, "VS has computed it"
        grad = state.product * scale.unsqueeze(1) - rows * self._at_labels(state).unsqueeze(1)
        self._give_gradient(index, grad.to(rows.dtype), state)

    @torch.no_grad()
    def _compute_gradients(self, index: int, *, training: bool) -> Tensor:
        """Run VT; return the loss, a sum over tokens."""
        state, kernels = self._logits.pop(index), self.cross_entropy
        every, targets, logits, x = state.statistics(), state.targets, state.logits, state.x.flatten(0, 1)
        loss = ((every.total.log() + every.peak - every.at_label) * targets.weights).sum()
        if not training:
            return loss
        scale = kernels.softmax_scale(targets, state.own.peak, every)
        if self.barriers == 2:
            kernels.write_gradient(logits, targets, state.own.peak, scale)
            self._give_gradient(index, logits @ self.head, state)
            accumulate_wgrad(self.head, logits, x)
        else:
            minus = self._at_labels(state)
            accumulate_wgrad(self.head, logits, (x * scale.unsqueeze(1)).to(x.dtype))
            accumulate_embedding_grad(self.head, targets.local_columns, x * -minus.unsqueeze(1))
        return loss

    def _give_gradient(self, index: int, grad: Tensor, state: _Logits) -> None:
        """Give this rank's part of the gradient of the last stage's output, summed over tp."""
        self.hidden_grads.given[index], _ = self.tp.reduce(grad.view(state.x.shape), LABEL.for_backward("gradient"))

    def _at_labels(self, state: _Logits) -> Tensor:
        """Return what the gradient has less at the labels, where they are on this rank."""
        minus, cap = state.targets.weights * state.targets.is_local, self.cross_entropy.cap
        return minus if cap is None else minus * soft_cap_derivative(state.own.at_label, cap)
