"""A part of a transformer block (`Part`), which answers for its own parameters, FLOPs, traffic, memory and time.

A block is a tuple of parts in forward order (`layout.blocks`). What is computed from a block asks its parts and never
their kind, so that a new kind of part is one class. Sizes are before tensor parallelism shards the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from megascale.config.model import ModelConfig
from megascale.config.sparse_pattern import Reach
from megascale.layout.parts.microbatch_sizes import CommOp, MicroBatchSizes, UnitBytes
from megascale.layout.parts.times import FieldSums, OperationTimes, PassTimes, Seconds
from megascale.layout.recompute_policy import RecomputePolicy
from megascale.layout.tensors import ParamSpec

Scores = Mapping[Reach | None, tuple[float, float]]
"""Scores of a head in the two conventions, full and causal, by the layer's window or sparse pattern; None for full
attention."""


@dataclass(frozen=True)
class TokenFlops(FieldSums):
    """FLOPs per token. `linear`: GEMMs with weights, including the head; `full_attention`, `causal_attention`: the two
    GEMMs of attention, Q K^T and P V.
    """

    linear: float = 0.0
    full_attention: float = 0.0
    causal_attention: float = 0.0

    @property
    def full(self) -> float:
        """FLOPs with the full attention matrix, or the full window of every query."""
        return self.linear + self.full_attention

    @property
    def causal(self) -> float:
        """FLOPs with the unmasked scores only."""
        return self.linear + self.causal_attention


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer: a GEMM [tokens, inputs] x [inputs, outputs].

    `name`: path inside the block, such as 'attention.qkv'. `label`: name in the event log. `parts`: logical parts of
    the weight with their rows, stacked along dimension 0. `fp8`: FP8 may run this GEMM; a router, for example, stays
    in the compute dtype. `bias`: the layer has a bias. `head_dim`: rows of an attention head, of which the parts are
    stacks; None for other layers. `alone`: no other operation saves the input.
    """

    name: str
    label: str
    inputs: int
    parts: tuple[tuple[str, int], ...]
    fp8: bool = True
    bias: bool = False
    head_dim: int | None = None
    alone: bool = True

    @property
    def outputs(self) -> int:
        """Output features: rows of the weight [outputs, inputs]."""
        return sum(rows for _, rows in self.parts)

    @property
    def weight_numel(self) -> int:
        """Elements of the weight."""
        return self.outputs * self.inputs


class Surroundings(NamedTuple):
    """A part's place in a block: the part `before`, the `rest` of its branch after it, and the `sources` of the next
    row-parallel layers' inputs. `adds_gradient`: a part of the block adds its input's gradient to that of
    column-parallel layers.
    """

    before: Part | None
    rest: tuple[Part, ...]
    sources: tuple[Part, ...]
    adds_gradient: bool

    @property
    def ends_in_norm(self) -> bool:
        """The branch's result is normalized before it is added to the residual stream."""
        return bool(self.rest) and self.rest[-1].normalizes

    @property
    def sums_gradients(self) -> bool:
        """The input's gradient is added to that of the branch's result, which linear layers have as it is."""
        return bool(self.rest) and bool(self.rest[-1].results) and not any(part.normalizes for part in self.rest)


class Part(ABC):
    """A part without parameters, GEMMs and communication; subclasses answer for what they have.

    `normalizes`: a norm, whose output the next part may recompute. `enters`: a part that does so, at the
    beginning of a branch. `feeds_rows`: the output is an input of the next row-parallel layers. `attends`: the core of
    attention.
    """

    normalizes: ClassVar[bool] = False
    enters: ClassVar[bool] = False
    feeds_rows: ClassVar[bool] = False
    attends: ClassVar[bool] = False

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts inside, whose linear layers with their collectives are the part's own."""
        return ()

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The linear layers that tp shards."""
        return tuple(layer for part in self.parts for layer in part.linears)

    @property
    def results(self) -> tuple[LinearSpec, ...]:
        """The row-parallel layers at the end, whose sum is the result of a branch."""
        return ()

    @property
    def ends_branch(self) -> bool:
        """The output is the result of a branch."""
        return bool(self.results)

    @property
    def token_weights(self) -> int:
        """Elements of the weights that a token is multiplied by."""
        return sum(layer.weight_numel for layer in self.linears)

    @property
    def expert_numel(self) -> int:
        """Elements of the weights that ranks along ep share."""
        return 0

    @property
    def whole_numel(self) -> int:
        """Elements of the matrices that every rank of tp has whole."""
        return 0

    @property
    def adds_gradient(self) -> bool:
        """The gradient of the input is added to the one that earlier column-parallel layers return."""
        return False

    def params(self, block: str, model: ModelConfig) -> list[ParamSpec]:
        """The parameters. `block`: name of the block."""
        return []

    def fp8_operands(self) -> Iterable[str]:
        """The operands that FP8 quantizes, such as 'mlp.up.weight'."""
        return (operand for part in self.parts for operand in part.fp8_operands())

    def flops(self, scores: Scores) -> TokenFlops:
        return TokenFlops(2 * self.token_weights)

    def recomputed_weights(self, full: bool, skipped: bool) -> int:
        """Count the elements of weights whose GEMMs backward repeats. `full`: of the entire block, but for layers that
        are `skipped`.
        """
        return self.token_weights if full and not skipped else 0

    def traffic(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        """List the collectives over tp of a forward or a backward, for a micro-batch."""
        for part in self.parts:
            yield from part.traffic(sizes, backward)

    def recomputed_traffic(self, sizes: MicroBatchSizes, skipped: bool) -> list[CommOp]:
        """List the collectives over tp that full recomputation repeats. `skipped`: without the result of the part."""
        return list(self.traffic(sizes))

    def context_traffic(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        """List the exchanges of context parallelism of a forward or a backward, for a micro-batch."""
        yield from ()

    def expert_traffic(self, sizes: MicroBatchSizes, backward: bool = False, again: bool = False) -> Iterator[CommOp]:
        """List the exchanges over ep of a forward, of a recomputed one (`again`), or a backward, for a micro-batch."""
        yield from ()

    def token_amaxes(self, sizes: MicroBatchSizes, backward: bool = False) -> Iterator[CommOp]:
        """List the all-reduces over cp of FP8 amaxes whose scales cover the tokens of a micro-batch."""
        for part in self.parts:
            yield from part.token_amaxes(sizes, backward)

    @abstractmethod
    def memory(self, sizes: MicroBatchSizes, at: Surroundings) -> UnitBytes:
        """Account for the activations of a micro-batch."""

    def kept(self, sizes: MicroBatchSizes) -> int:
        """Size what full recomputation does not repeat."""
        return 0

    def chunk_store(self, sizes: MicroBatchSizes, tokens: int, chunks: int) -> int:
        """Size what the `chunks` of a sequence of `tokens` leave for one another until their backwards."""
        return 0

    def recomputes_input(self, sizes: MicroBatchSizes) -> bool:
        """Wgrad recomputes the part's input, the result of a norm, from that of the norm."""
        return False

    def recomputes_output(self, recompute: RecomputePolicy) -> bool:
        """Backward recomputes the output in place of saving it as the input of row-parallel layers."""
        return False

    def spared_reads(self, sizes: MicroBatchSizes, after: Part | None, by_amax: bool) -> tuple[int, int]:
        """Size what casts by tensors need not read, forward and backward: a part finds an amax (`by_amax`) or casts."""
        return 0, 0

    @abstractmethod
    def seconds(self, times: OperationTimes, fp8: bool) -> PassTimes:
        """Time a micro-batch, with exposed communication. `fp8`: the linear layers run FP8 GEMMs."""

    def recomputed_seconds(self, forward: Seconds, recompute: RecomputePolicy, after: Part | None) -> Seconds:
        """Return the part of a `forward` that selective recomputation repeats. `after`: the next part."""
        return Seconds()
