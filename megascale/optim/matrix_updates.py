"""Updates of whole matrices on their owners, and the state that owners keep.

    start_gather    gradients, and weights for rules that read them, to the owners
    compute         one rule after another on this rank's matrices; directions on their way back
    apply           steps along the directions, in this rank's shard of the master weights

The state of a matrix is on its owner, in the shapes of the rule's card, and in checkpoints by the tensor's global name;
that of matrices of a stack is stacked there, as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.layout.buckets import SlotRange
from megascale.layout.owners import OwnedMatrix, assign_owners
from megascale.ops.optimizer import UpdateInput, UpdateRule
from megascale.optim.clipping import Clipping, counted_elements
from megascale.optim.element_updates import apply_direction, copy_unless
from megascale.optim.matrix_exchange import MatrixExchange
from megascale.optim.updates import Parts, Updates
from megascale.parallel.bucket import Bucket


class MatrixUpdates(Updates):
    """The matrices of all buckets that rules of whole matrices update. The rules are functions."""

    def __init__(self, parts: Parts) -> None:
        places = assign_owners([shard.bucket.layout for shard in parts.shards], parts.groups, parts.mesh.topology)
        self._recorder = parts.mesh.recorder
        self.buckets = {
            index: BucketMatrices(parts, index, of_bucket) for index, of_bucket in enumerate(places) if of_bucket
        }

    def compute(self, lr: float, step: int, clipping: Clipping) -> None:
        if self.buckets:
            with self._recorder.action("compute_updates"):
                for matrices in self.buckets.values():
                    matrices.start_gather()
                for matrices in self.buckets.values():
                    matrices.compute(lr, step, clipping)

    def apply(self, index: int, lr: float, step: int, clipping: Clipping) -> None:
        if index in self.buckets:
            self.buckets[index].apply(lr, step, clipping)

    def matrix_state(self) -> Iterator[tuple[Bucket, OwnedMatrix, str, Tensor]]:
        for matrices in self.buckets.values():
            yield from matrices.tensors()

    def end_restore(self) -> None:
        for matrices in self.buckets.values():
            matrices.note_fresh_state()


class BucketMatrices:
    """The matrices of bucket `index`, `places`, on all ranks, and the state of those that this rank owns, by number."""

    def __init__(self, parts: Parts, index: int, places: Sequence[OwnedMatrix]) -> None:
        self.places = places
        shard, mesh = self._shard, self._mesh = parts.shards[index], parts.mesh
        self._rules, self._kept = cast(Mapping[str, UpdateRule], parts.rules), parts.kept
        self._counted = shard.bucket.shard[0] + counted_elements(shard.bucket, tp=mesh.tp.index)
        self._gradients = MatrixExchange(shard.bucket, places, mesh)
        self._with_weight = [number for number, place in enumerate(places) if place.group.facts["weight"]]
        self._weights = MatrixExchange(shard.bucket, [places[number] for number in self._with_weight], mesh)
        self.state = {number: self._new_state(places[number]) for number in self._gradients.owned}
        self._first = set(range(len(places)))  # matrices with state of zero, on any rank
        self._skip: Tensor | None = None  # of the step that was to begin them

    def start_gather(self) -> None:
        """Start to send this rank's shards of the gradients, and of weights that rules read."""
        self._gradients.start_gather(self._shard.bucket.grad)
        if self._with_weight:
            self._weights.start_gather(self._shard.master_fp32)

    def compute(self, lr: float, step: int, clipping: Clipping) -> None:
        """Update this rank's matrices, and start to send the directions back. Without other ranks `apply` does it, and
        needs no memory for all directions.
        """
        if not self._gradients.is_local:
            self._gradients.start_return(self._directions(lr, step, clipping))

    def apply(self, lr: float, step: int, clipping: Clipping) -> None:
        """Update this rank's shard of the master weights."""
        if self._gradients.is_local:
            for number, direction in self._directions(lr, step, clipping):
                self._step(number, self._gradients.stored(number), direction.reshape(-1), lr, clipping.skip)
                del direction  # before the next one is computed
        else:
            for number, elements, direction in self._gradients.finish_return():
                self._step(number, elements, direction, lr, clipping.skip)

    def _directions(self, lr: float, step: int, clipping: Clipping) -> Iterator[tuple[int, Tensor]]:
        """Update the state of this rank's matrices, and yield their numbers and directions, one matrix at a time."""
        gradients = self._gradients.finish_gather()
        weights = self._weights.finish_gather() if self._with_weight else {}
        by_number = {self._with_weight[index]: weights.pop(index) for index in list(weights)}
        first = self._begin(clipping.skip)

        def direction_of(number: int) -> Tensor:  # a function, whose temporary tensors end with it
            place, state, grad = self.places[number], self.state[number], gradients.pop(number)
            grad = grad * clipping.grad_factor.to(grad.dtype)
            grad.masked_fill_(clipping.skip > 0, 0.0)  # no decomposition of NaN
            given = UpdateInput(
                grad, state, step, place.group.all_options, by_number.pop(number, None), place.tensor.head_dim,
                place.name(self._mesh.topology, self._mesh.coord), first=number in first, lr=lr * place.group.lr_mult,
                dtype=self._shard.bucket.shard_weights.dtype,
            )  # fmt: skip
            direction, new_state = self._rules[place.group.rule](given)
            copy_unless(clipping.skip, state, new_state)
            return direction

        yield from ((number, direction_of(number)) for number in list(gradients))

    def _step(self, number: int, elements: SlotRange, direction: Tensor, lr: float, skip: Tensor) -> None:
        """Step along a direction, in the master weights of `elements`."""
        place, shard, first = self.places[number], self._shard, self._shard.bucket.shard[0]
        decay = place.group.weight_decay if place.range.slot.parameter.weight_decay else 0.0
        if number in self._first and not place.group.facts["first_moves"]:
            skip = torch.ones_like(skip)
        residual = None if shard.residual is None else elements.view(shard.residual, first)
        master = elements.view(shard.master, first)
        rate, counted = lr * place.group.lr_mult, self._counted - elements.start
        apply_direction(master, residual, direction, rate, decay, skip, self._kept, counted)

    def _begin(self, skip: Tensor) -> set[int]:
        """Return the matrices with state of zero: all begin in one step, unless it is skipped. The host waits for the
        device in the second step only.
        """
        if self._skip is not None:
            self._first = self._first if bool(self._skip) else set()
        self._skip = skip if self._first else None
        return self._first

    def note_fresh_state(self) -> None:
        """Take note of the state that is zero, after a load or a restore: of a stack, that of all matrices, since an
        expert without tokens has begun with the others.
        """
        tensors = [place.tensor.name for place in self.places]
        positions = {name: position for position, name in enumerate(dict.fromkeys(tensors))}
        begun = self._shard.bucket.grad.new_zeros(len(positions))
        for number, state in self.state.items():
            begun[positions[tensors[number]]] += any(bool(values.any()) for values in state.values())
        for group in (self._mesh.tp, self._mesh.dp):
            all_reduce(group, begun, "max", label="matrices with state")
        zero = begun.tolist()
        self._first = {number for number, name in enumerate(tensors) if not zero[positions[name]]}
        self._skip = None

    def tensors(self) -> Iterator[tuple[Bucket, OwnedMatrix, str, Tensor]]:
        """Yield the state tensors that this rank owns, as `Updates.matrix_state`."""
        for number, state in self.state.items():
            yield from ((self._shard.bucket, self.places[number], name, values) for name, values in state.items())

    def _new_state(self, place: OwnedMatrix) -> dict[str, Tensor]:
        grad, eight_bit = self._shard.bucket.grad, place.group.facts["uint8"]
        return {
            name: torch.zeros(shape, dtype=torch.uint8 if name in eight_bit else grad.dtype, device=grad.device)
            for name, shape in place.group.state_shapes(place.shape).items()
        }
