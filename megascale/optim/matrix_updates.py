"""Updates of whole matrices on their owners, and the state that owners keep.

    start_gather    gradients, and weights for rules that read them, to the owners
    compute         one rule after another on this rank's matrices; directions on their way back
    apply           steps along the directions, in this rank's shard of the master weights

The state of a matrix is on its owner, in the shapes of the rule's card, and in checkpoints by the matrix's global name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh
from megascale.layout.owners import MatrixShard
from megascale.ops.optimizer import UpdateInput, UpdateRule
from megascale.optim.function_rule import apply_direction, copy_unless
from megascale.parallel.matrix_exchange import MatrixExchange
from megascale.parallel.optimizer_shard import OptimizerShard
from megascale.parallel.stateful import GlobalTensor, TensorShard


class MatrixUpdates:
    """The matrices of a bucket that rules of whole matrices update."""

    def __init__(
        self, shard: OptimizerShard, places: Sequence[MatrixShard], mesh: Mesh, rules: Mapping[str, UpdateRule]
    ) -> None:
        self._shard = shard
        self._mesh = mesh
        self._places = places
        self._rules = rules
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

    def compute(self, lr: float, step: int, grad_factor: Tensor, skip: Tensor) -> None:
        """Update this rank's matrices, and start to send the directions back. Arguments are those of
        `ops.optimizer.Elementwise.step`. Without other ranks `apply` does it, and needs no memory for all directions.
        """
        if not self._gradients.is_local:
            self._gradients.start_return(dict(self._directions(lr, step, grad_factor, skip)))

    def apply(self, lr: float, step: int, grad_factor: Tensor, skip: Tensor) -> None:
        """Update this rank's shard of the master weights."""
        if self._gradients.is_local:
            for number, direction in self._directions(lr, step, grad_factor, skip):
                self._step(number, self._gradients.start_of(number), direction.reshape(-1), lr, skip)
        else:
            for number, start, direction in self._gradients.finish_return():
                self._step(number, start, direction, lr, skip)

    def _directions(self, lr: float, step: int, grad_factor: Tensor, skip: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Update the state of this rank's matrices, and yield their numbers and directions."""
        gradients = self._gradients.finish_gather()
        weights = self._weights.finish_gather() if self._with_weight else {}
        by_number = {self._with_weight[index]: weights.pop(index) for index in list(weights)}
        first = self._begin(skip)
        for number in list(gradients):
            place, state, grad = self._places[number], self.state[number], gradients.pop(number)
            grad = (grad * grad_factor.to(grad.dtype)).masked_fill_(skip > 0, 0.0)  # no decomposition of NaN
            given = UpdateInput(
                grad, state, step, place.group.all_options, by_number.pop(number, None), place.tensor.head_dim,
                place.tensor.name, first=number in first, lr=lr * place.group.lr_mult,
                dtype=self._shard.bucket.shard_weights.dtype,
            )  # fmt: skip
            direction, new_state = self._rules[place.group.rule](given)
            copy_unless(skip, state, new_state)
            yield number, direction

    def _step(self, number: int, start: int, direction: Tensor, lr: float, skip: Tensor) -> None:
        """Step along a direction, in elements of the shard from `start` on."""
        place, here = self._places[number], slice(start, start + direction.numel())
        decay = place.group.weight_decay if place.weight_decay else 0.0
        if number in self._first and not place.group.facts["first_moves"]:
            skip = torch.ones_like(skip)
        residual = None if self._shard.residual is None else self._shard.residual[here]
        apply_direction(self._shard.master[here], residual, direction, lr * place.group.lr_mult, decay, skip)

    def _begin(self, skip: Tensor) -> set[int]:
        """Return the matrices with state of zero: all begin in one step, unless it is skipped. The host waits for the
        device in the second step only.
        """
        if self._skip is not None:
            self._first = self._first if bool(self._skip) else set()
        self._skip = skip if self._first else None
        return self._first

    def note_fresh_state(self) -> None:
        """Take note of the state that is zero, after a load or a restore."""
        begun = self._shard.bucket.grad.new_zeros(len(self._places))
        for number, state in self.state.items():
            begun[number] = any(bool(values.any()) for values in state.values())
        for group in (self._mesh.tp, self._shard.bucket.group):
            all_reduce(group, begun, "max", label="matrices with state")
        self._first = set((begun == 0).nonzero().view(-1).tolist())
        self._skip = None

    def tensors(self) -> Iterator[tuple[MatrixShard, str, Tensor]]:
        """Yield the state tensors that this rank owns: matrix, name and values."""
        for number, state in self.state.items():
            yield from ((self._places[number], name, values) for name, values in state.items())

    def global_tensors(self) -> dict[str, GlobalTensor]:
        """Return the state by global name."""
        return {
            _key(place, name): GlobalTensor(
                tuple(values.shape),
                values.dtype,
                [TensorShard((0,) * values.dim(), tuple(values.shape), values)],
            )
            for place, name, values in self.tensors()
        }

    def _new_state(self, place: MatrixShard) -> dict[str, Tensor]:
        grad, eight_bit = self._shard.bucket.grad, place.group.facts["uint8"]
        return {
            name: torch.zeros(shape, dtype=torch.uint8 if name in eight_bit else grad.dtype, device=grad.device)
            for name, shape in place.group.state_shapes(place.shape).items()
        }


def _key(place: MatrixShard, state: str) -> str:
    """Return the global name of a matrix's state."""
    return f"{state}.{place.tensor.name}"
