"""Buckets: the layout of parameters in a contiguous buffer.

A bucket is the unit of gradient reduction, data-parallel sharding and parameter all-gather. Its shards are equal
contiguous ranges: a reduce-scatter or an all-gather is a single collective without copies (MegaScale 3.2, where a
bucket is a model chunk). Parameters are sorted such that those with equal optimizer flags, and those that tp
replicates, are contiguous ranges as well; replicas with partial gradients (`ParamSpec.tp_partial`) come first:

    | sharded by tp: matrices, vectors | replicated over tp: partial, matrices, vectors | padding |
    |     shard 0      |      shard 1      |      shard 2      |      shard 3           |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.topology import REPLICATE, Topology, inner_axes

ALIGNMENT = 64  # elements to which the starts of parameters and shards are aligned: 128 bytes or more in every dtype

SUB_GROUP = 1 << 24  # elements of state in host memory that are updated at a time, a multiple of ALIGNMENT
AHEAD = 2  # sub-groups whose copies are on their way at a time, in each direction

SHARDED: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("state",),
    2: ("gradient", "state"),
    3: ("weight", "gradient", "state"),
}
"""Tensors that the ranks which reduce a bucket's gradient shard, by stage of ZeRO (Rajbhandari et al. 2020): weights;
the gradient, in a step also between micro-batches; master weights and optimizer state. Each rank has all of the rest.

With hybrid sharding (HSDP; Zhao et al. 2023) the inner ones of these ranks shard, and outer ones with the same shards
sum their gradients at the end of a step. State may be sharded over all (HFSDP, `Topology.state_over_all`).
"""


class ShardAxes(NamedTuple):
    """The axes of parallelism whose ranks shard what `SHARDED` lists; () where each rank has all."""

    weight: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()
    state: tuple[str, ...] = ()


class _Sliceable(Protocol):
    def __getitem__(self, elements: slice, /) -> Any: ...


Flat = TypeVar("Flat", bound=_Sliceable)
"""A tensor or an array of one dimension."""


@dataclass(frozen=True)
class Slot:
    """A parameter's range in a bucket, in elements."""

    parameter: ParamSpec
    start: int
    stop: int


@dataclass(frozen=True)
class SlotRange:
    """Elements [start, stop) of a bucket. `slot`: of the parameter, or of the first of several, that they belong to.
    `part`: which of the parameter's tensors has the first element; `matrix`: and which of this rank's matrices, if the
    tensor is a stack. Padding after parameters may be included.
    """

    slot: Slot
    start: int
    stop: int
    part: int = 0
    matrix: int = 0

    @property
    def tensor(self) -> TensorSpec:
        return self.slot.parameter.parts[self.part]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def clipped(self, start: int, stop: int) -> SlotRange:
        """The part inside [start, stop), of no elements or fewer where there is none."""
        return replace(self, start=max(self.start, start), stop=min(self.stop, stop))

    def matrices(self) -> Iterator[SlotRange]:
        """The matrices of this rank's part of a stack, cut along the stack only; of another tensor all elements."""
        size = math.prod(self.tensor.shape[-2:]) if self.tensor.is_stack else self.numel
        for matrix, start in enumerate(range(self.start, self.stop, size)):
            yield replace(self, start=start, stop=start + size, matrix=matrix)

    def view(self, flat: Flat, first: int = 0) -> Flat:
        """These elements of `flat` [n], which begins at element `first` of the bucket."""
        elements: Flat = flat[self.start - first : self.stop - first]
        return elements


def inside(ranges: Iterable[SlotRange], start: int, stop: int) -> list[SlotRange]:
    """The parts of ranges inside [start, stop)."""
    clipped = (item.clipped(start, stop) for item in ranges)
    return [item for item in clipped if item.numel > 0]


def joined(ranges: Iterable[SlotRange]) -> list[SlotRange]:
    """Join ascending ranges that touch."""
    found: list[SlotRange] = []
    for item in ranges:
        if found and found[-1].stop == item.start:
            found[-1] = replace(found[-1], stop=item.stop)
        else:
            found.append(item)
    return found


@dataclass(frozen=True)
class BucketLayout:
    """The slots of a bucket in order, and its size `numel`, a multiple of `num_shards`. All sizes are in elements.

    `reduce_axes`: the axes of parallelism whose ranks' gradients are summed; `shard_axes`: those whose ranks shard the
    bucket; `num_shards`: ranks along `reduce_axes`. `replicated`: the range of the parameters that tp replicates;
    `tp_partial`: those whose gradient is always partial. `copies`: groups of inner ranks that shard the bucket;
    `state_copies`: and of ranks that shard its state, 1 if all do.
    """

    slots: tuple[Slot, ...]
    numel: int
    reduce_axes: tuple[str, ...]
    shard_axes: ShardAxes
    num_shards: int
    replicated: tuple[int, int]
    tp_partial: tuple[int, int]
    copies: int = 1
    state_copies: int = 1

    def summed_over_tp(self, sequence: bool) -> tuple[int, int]:
        """The range of parameters whose replicas hold partial gradients; with `sequence` parallelism all replicas hold
        those of their tokens.
        """
        return self.replicated if sequence else self.tp_partial

    @property
    def has_experts(self) -> bool:
        """The parameters are experts: ranks along tp are no shards and no replicas of them, but those along edp are."""
        return "ep" in self.slots[0].parameter.sharding

    @property
    def frozen(self) -> bool:
        """The parameters are not trained: they have no gradients and no optimizer state."""
        return self.slots[0].parameter.frozen

    @property
    def shares_vocabulary(self) -> bool:
        """The parameters are rows of the vocabulary, which the pipeline's stages share."""
        return "pp" in self.slots[0].parameter.sharding

    @property
    def fp8_numel(self) -> int:
        """The elements of the first weights, as far as FP8 may run their GEMMs: of linear layers, or of experts."""
        may = (slot.parameter.fp8 or (self.has_experts and slot.parameter.is_matrix) for slot in self.slots)
        return max((slot.stop for slot, _ in itertools.takewhile(all, zip(self.slots, may, strict=True))), default=0)

    @property
    def padding(self) -> list[tuple[int, int]]:
        """The ranges (start, stop) after slots that belong to no parameter."""
        return [(slot.stop, end) for slot, end in self._slot_ends if slot.stop < end]

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """The axes whose ranks scatter sums of gradients among them, and gather weights; () if none do."""
        return self.shard_axes.gradient or self.shard_axes.state

    @property
    def outer_axes(self) -> tuple[str, ...]:
        """The axes that reduce the bucket besides; () if the inner ones are all."""
        return (REPLICATE,) if self.copies > 1 else ()

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes that reduce the bucket and do not shard its state: their ranks update the same elements."""
        if not self.shard_axes.state:
            return self.reduce_axes
        return self.outer_axes if self.state_copies > 1 else ()

    @property
    def state_shards(self) -> int:
        """The ranks that shard the bucket's state; without ZeRO those that would."""
        return self.num_shards // self.state_copies

    def state_shard(self, index: int) -> int:
        """The number of the state's shard of the rank with this index along `shard_axes.state`: inner ranks' weights
        ascend, and outer ranks have parts of them.
        """
        outer, inner = divmod(index, self.num_shards // self.copies)
        return inner * (self.copies // self.state_copies) + outer

    def state_range(self, index: int) -> tuple[int, int]:
        """The range of the state of the rank with this index along `shard_axes.state`."""
        sharded = bool(self.shard_axes.state)
        return self.shard_range(self.state_shard(index), self.state_shards) if sharded else (0, self.numel)

    def shard_range(self, index: int, count: int | None = None) -> tuple[int, int]:
        """The range of shard `index` of `count`, by default of `num_shards`."""
        size = self.numel // (self.num_shards if count is None else count)
        return index * size, (index + 1) * size

    def param_ranges(self, start: int, stop: int) -> list[SlotRange]:
        return inside((SlotRange(slot, slot.start, slot.stop) for slot in self.slots), start, stop)

    def tensor_ranges(self, start: int, stop: int, topology: Topology) -> list[SlotRange]:
        """The parts of the tensors inside [start, stop), such as of q, k and v."""
        found = []
        for slot in self.slots:
            low = slot.start
            for part, tensor in enumerate(slot.parameter.parts):
                high = low + math.prod(tensor.local_shape(topology))
                found.append(SlotRange(slot, low, high, part))
                low = high
        return inside(found, start, stop)

    def matrix_ranges(self, start: int, stop: int, topology: Topology) -> list[SlotRange]:
        """The parts of matrices and vectors inside [start, stop), such as of q, k and v, and of each expert."""
        tensors = self.tensor_ranges(0, self.numel, topology)
        return inside((matrix for item in tensors for matrix in item.matrices()), start, stop)

    def merged_ranges(self, start: int, stop: int) -> list[SlotRange]:
        """The ranges of parameters with equal optimizer flags inside [start, stop). A range includes the padding after
        its slots.
        """
        ranges = (SlotRange(slot, slot.start, end) for slot, end in self._slot_ends)
        runs = itertools.groupby(ranges, key=lambda item: _optimizer_flags(item.slot.parameter))
        return inside((item for _, run in runs for item in joined(run)), start, stop)

    @property
    def _slot_ends(self) -> Iterator[tuple[Slot, int]]:
        """Pairs of a slot and the start of its successor."""
        return zip(self.slots, [*(slot.start for slot in self.slots[1:]), self.numel], strict=True)


def sub_groups(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut a shard into sub-groups, in which a kernel's vectors of elements are those of the whole shard."""
    return [(first, min(first + SUB_GROUP, stop)) for first in range(start, stop, SUB_GROUP)]


def split_by_reduction(parameters: Iterable[ParamSpec]) -> list[list[ParamSpec]]:
    """Split parameters into those that may share a bucket: their gradients are summed over the same ranks, or they are
    frozen and have none.
    """
    alike: dict[tuple[bool, tuple[str, ...]], list[ParamSpec]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.frozen, parameter.reduce_axes), []).append(parameter)
    return list(alike.values())


def pack(parameters: Sequence[ParamSpec], topology: Topology, zero: int = 0) -> BucketLayout:
    """Lay out parameters with common reduction axes: sharded over tp before replicated, matrices before vectors.

    `zero`: the stage of ZeRO, a row of `SHARDED`; the order and the size depend neither on it nor on who shards.
    """
    axes = parameters[0].reduce_axes
    assert len(split_by_reduction(parameters)) == 1, "the gradients of a bucket have a common reduction group"
    shards = topology.size(*axes)
    slots: list[Slot] = []
    at = replicated_start = partial_stop = 0

    def order(parameter: ParamSpec) -> tuple[bool, ...]:
        return parameter.is_replicated, not parameter.tp_partial, *_optimizer_flags(parameter)

    for parameter in sorted(parameters, key=order):  # stable
        slots.append(Slot(parameter, at, at + parameter.local_numel(topology)))
        at = _align(slots[-1].stop, ALIGNMENT)
        if not parameter.is_replicated:
            replicated_start = at
        if parameter.tp_partial or not parameter.is_replicated:
            partial_stop = at
    numel, replicated = _align(at, ALIGNMENT * shards), (replicated_start, at)
    copies = shards // topology.size(*inner_axes(axes))
    shard_axes = ShardAxes(**dict.fromkeys(SHARDED[zero], inner_axes(axes) if copies > 1 else axes))
    state_copies = 1 if topology.state_over_all and shard_axes.weight else copies
    if state_copies < copies:
        shard_axes = shard_axes._replace(state=axes)
    return BucketLayout(
        tuple(slots), numel, axes, shard_axes, shards, replicated, (replicated_start, partial_stop), copies,
        state_copies,
    )  # fmt: skip


def _optimizer_flags(parameter: ParamSpec) -> tuple[bool, bool]:
    """The flags by which an optimizer treats parameters differently; matrices with weight decay sort first."""
    return not parameter.is_matrix, not parameter.weight_decay


def _align(value: int, unit: int) -> int:
    return math.ceil(value / unit) * unit
