"""Seconds of a block's parts by cause, and the operations that they are made of (`OperationTimes`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add
from typing import Protocol, Self

from megascale.config.sparse_pattern import Reach
from megascale.layout.parts.microbatch_sizes import CommOp, MicroBatchSizes


class FieldSums:
    """Values that are added and scaled field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(add, vars(self).values(), vars(other).values()))

    def __mul__(self, factor: float) -> Self:
        return type(self)(*(value * factor for value in vars(self).values()))


@dataclass(frozen=True)
class Seconds(FieldSums):
    """Seconds of a rank by cause. `host`: waits for launches; `tp`, `cp`, `ep`, `dp`: exposed communication, for dp
    of ZeRO-3; `offload`: exposed copies of saved tensors to and from another store.
    """

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    host: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    offload: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def sent(self) -> Seconds:
        """The exposed communication between the ranks of a layer."""
        return Seconds(tp=self.tp, cp=self.cp, ep=self.ep)


@dataclass(frozen=True)
class PassTimes(FieldSums):
    """A forward and a backward. `weights`: the part of the backward that a split one does in W."""

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()
    weights: Seconds = Seconds()

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total

    @property
    def attention(self) -> float:
        """The seconds of attention, forward and backward, and of all that is recomputed, which may have attention."""
        return self.forward.attention + self.backward.attention + self.backward.recompute


class OperationTimes(Protocol):
    """Times of the operations of a micro-batch of `sizes` on a tensor-parallel rank (`plan.simulate.layer_time`), or of
    a tile of it, with `tokens`, and `stream` elements of the residual stream on the rank. `stops_early`: recomputation
    ends before the last GEMM, whose result has no use.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def stream(self) -> int: ...

    @property
    def stops_early(self) -> bool: ...

    @property
    def sizes(self) -> MicroBatchSizes: ...

    def in_tiles(self, tiles: int) -> OperationTimes:
        """Return the times of one of `tiles` of the tokens."""

    def passes(self, elements: float, backward: int = 2) -> PassTimes:
        """Time element-wise operations with `elements` moved in forward, and `backward` times as many in backward."""

    def linears(self, shapes: Iterable[tuple[int, int]], fp8: bool, enters: bool, width: int) -> PassTimes:
        """Time linear layers [outputs, inputs] of this rank with a common collective over tp: on the input (`enters`),
        or on the output, of `width` elements a token.
        """

    def local_linear(self, outputs: int, inputs: int) -> PassTimes:
        """Time a linear layer of this rank's tokens of the residual stream, without communication."""

    def grouped_linears(self, shapes: Iterable[tuple[int, int]], experts: int, rows: float, fp8: bool) -> PassTimes:
        """Time linear layers [outputs, inputs] of each of `experts` for `rows` rows each. `fp8`: where the recipe
        has GEMMs of experts.
        """

    def exchanges(self, sent: Sequence[Iterable[CommOp]], beside: PassTimes) -> PassTimes:
        """Time the exposed exchanges over ep in forward and in backward, which overlap with GEMMs `beside` in blocks of
        tokens.
        """

    def host_wait(self) -> PassTimes:
        """Time a forward's wait for numbers on the host."""

    def sums(self, nbytes: int) -> PassTimes:
        """Time exposed all-reduces over tp of `nbytes`, one in forward and one in backward."""

    def attention(
        self, heads: int, window: Reach | None, width: int, exchanges: Sequence[Iterable[CommOp]]
    ) -> PassTimes:
        """Time attention of `heads` of `width` over all ranks, with the `exchanges` of context parallelism in forward
        and in backward.
        """

    def linear_attention(self, heads: int, width: int, block: int, exchanges: Sequence[Iterable[CommOp]]) -> PassTimes:
        """Time linear attention of `heads` of `width` over all ranks in blocks of tokens, with its `exchanges`."""
