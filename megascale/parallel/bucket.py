"""A bucket of parameters in training: views of contiguous weights and gradients, of which a storage says what this rank
keeps (`parallel.bucket_storage`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megascale.comm.collectives import all_reduce
from megascale.comm.group import single_rank_group
from megascale.comm.mesh import Mesh
from megascale.layout.buckets import Slot, pack
from megascale.layout.chunks import module_of
from megascale.layout.tensors import TOKEN_EMBEDDING, ParamSpec
from megascale.ops.quantized import Quantized
from megascale.ops.wgrad import Wgrad
from megascale.parallel.bucket_storage import Sharded, build_storage
from megascale.parallel.grad_accumulation import Accumulation, accumulate_grad


class Bucket:
    """Parameters of a chunk in one contiguous buffer, and their gradients in another.

    - `storage`, and of it `weights`, `grad`, `shard`, `group` and `replicas` (`parallel.bucket_storage.Storage`)
    - `parameters`: by name, of NaN while sharded weights are not gathered (`bind_weights`), or gathered as codes
    - `coded`: by the name of a parameter that is gathered as codes, this rank's, with the scales of the whole
    - `tied`: the bucket is the token embedding alone, which the first and last pipeline stages share if it is tied
    - `tied_group`: the ranks that share a tied embedding; of one rank otherwise
    - `frozen`: the parameters are not trained, and have no gradients
    - `outdated`: its codes are of other weights: of those before an update or a load
    - `users`: the number of this rank's chunks that use it, in which its gradients are complete in the last of them
    - `grad_reader`: if set, is called once, with the bucket and its full gradient [size] after the next backward

    `dtypes`: (compute, accumulation). `place`: (chunk, suffix of the bucket's name in the chunk). `coded`: gradients
    are reduced as FP8 codes.
    """

    def __init__(
        self, parameters: Sequence[ParamSpec], mesh: Mesh, zero: int, dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device, place: tuple[int, str], wgrad: Wgrad, coded: bool = False,
    ) -> None:  # fmt: skip
        self.chunk = place[0]
        self.label = "chunk {}{}".format(*place)  # its name in the event log
        self.first_module = module_of(parameters[0].name)
        layout = self.layout = pack(parameters, mesh.topology, zero)
        self.frozen = layout.frozen
        tied = self.tied = [p.name for p in parameters] == [TOKEN_EMBEDDING]
        self.tied_group = mesh.tied if tied else single_rank_group("tied")
        self._tp = mesh.tp
        storage = self.storage = build_storage(layout, mesh, dtypes, device, self.label, coded)
        self.weights, self.grad, self.shard = storage.weights, storage.grad, storage.shard
        self.group, self.replicas = storage.group, storage.replicas
        self.parameters: dict[str, nn.Parameter] = {}
        self.coded: dict[str, Quantized] = {}
        self._missing = self.weights.new_full((), math.nan)
        whole = None if layout.shard_axes.weight else self.weights
        for slot in layout.slots:
            view = self._view(whole, slot, slot.parameter.local_shape(mesh.topology))
            parameter = self.parameters[slot.parameter.name] = nn.Parameter(view, requires_grad=not self.frozen)
            parameter.accumulation = Accumulation(wgrad)  # type: ignore[attr-defined]
            if not self.frozen:
                parameter.register_post_accumulate_grad_hook(_accumulate_into_bucket)
        self.grad_reader: Callable[[Bucket, Tensor], None] | None = None
        self.outdated = True
        self.users = 1
        self._left_by = 0  # chunks that have left it since the last reduction
        self._bind_gradient()

    @property
    def shard_weights(self) -> Tensor:
        """This rank's shard of the weights, a view."""
        return self.storage.shard_weights

    @property
    def sharded(self) -> Sharded:
        """The storage of weights that are gathered."""
        assert isinstance(self.storage, Sharded), "every rank updates all weights"
        return self.storage

    def shards(self) -> Iterator[tuple[nn.Parameter, ParamSpec]]:
        """Yield this rank's shard of each parameter."""
        yield from ((self.parameters[slot.parameter.name], slot.parameter) for slot in self.layout.slots)

    def bind_weights(self, whole: Tensor | None) -> None:
        """Make the parameters views of `whole` [size], or NaN without it, in which a layer shows that runs without its
        weights. Autograd has saved the parameters themselves, and reads what they are views of in backward.
        """
        for slot in self.layout.slots:
            parameter = self.parameters[slot.parameter.name]
            parameter.data = self._view(whole, slot, parameter.shape)
            parameter.gathered = None  # type: ignore[attr-defined]

    def bind_gathered(self, memory: Tensor) -> None:
        """Make the parameters views of `memory` (`Sharded.gather_into`); or leave them NaN, with the matrix of their
        codes as `gathered`.
        """
        (codes, rest), first = self.sharded.views(memory), self.sharded.coded
        for slot in self.layout.slots:
            parameter, part = self.parameters[slot.parameter.name], self.coded.get(slot.parameter.name)
            if part is not None:
                matrix = codes[slot.start : slot.stop].view(-1, parameter.shape[-1])
                parameter.gathered = part.gathered(matrix, part.scale)  # type: ignore[attr-defined]
            else:
                parameter.data = rest[slot.start - first : slot.stop - first].view(parameter.shape)

    def keep_codes(self, coded: int) -> None:
        """Gather the first `coded` elements as FP8 codes."""
        self.sharded.keep_codes(coded)
        self.weights = self.storage.weights

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Have parameters of zero to write, of which this rank keeps its shard; without sharded weights all of them."""
        if not self.layout.shard_axes.weight:
            yield
            return
        whole = self.weights.new_zeros(self.layout.numel)
        self.bind_weights(whole)
        yield
        self.bind_weights(None)
        self.weights.copy_(whole[slice(*self.storage.held)])

    def begin_step(self) -> None:
        """Begin a step: its first contributions overwrite the gradients of the last step."""
        self._restart_accumulation()
        self.storage.begin_step()

    def acquire_gradient(self) -> None:
        """Have a full gradient to add to, until the next reduction."""
        if not self.frozen and self.storage.acquire_gradient():
            self._bind_gradient()
            self._restart_accumulation()

    def leave(self) -> bool:
        """Note that a chunk has made its last gradients before a reduction; return True if all of its users have."""
        self._left_by = (self._left_by + 1) % self.users
        return self._left_by == 0

    def start_reduction(self) -> None:
        """Start the data-parallel reduction of the gradients accumulated since the last reduction."""
        self._zero_missing_grads()
        self.read_full_grad()  # a reduction may begin within a backward
        self.storage.release_gradient()
        if self.storage.full_grad is None:
            self._bind_gradient()

    def read_full_grad(self) -> None:
        """Call `grad_reader`, if one is set, with the gradients accumulated so far; not after their reduction."""
        if self.grad_reader is not None and self.storage.full_grad is not None:
            self._zero_missing_grads()
            self.grad_reader(self, self.storage.full_grad)
            self.grad_reader = None

    def reduce_partial_grads(self, *, sequence: bool) -> None:
        """All-reduce gradients that are still partial after the data-parallel reduction.

        With sequence parallelism, gradients of parameters replicated over tp (norms, row-parallel biases) cover only
        this rank's tokens. QK-norm gradients always cover only this rank's heads. Both are summed over tp. A tied
        embedding is summed over the first and last pipeline stages.
        """
        if self._tp.size > 1:
            edges = self.layout.summed_over_tp(sequence)
            low, high = (min(max(edge, self.shard[0]), self.shard[1]) for edge in edges)
            if low < high:
                partial = self.grad[low - self.shard[0] : high - self.shard[0]]
                all_reduce(self._tp, partial, label=f"{self.label} partial gradients")
        all_reduce(self.tied_group, self.grad, label=self.label)  # no-op for an untied bucket: a single-rank group

    def _view(self, whole: Tensor | None, slot: Slot, shape: Sequence[int]) -> Tensor:
        return self._missing.expand(shape) if whole is None else whole[slot.start : slot.stop].view(shape)

    def _zero_missing_grads(self) -> None:
        """Zero the gradients without contributions since the last reduction."""
        for parameter in self.parameters.values():
            if not parameter.accumulation.begun:  # type: ignore[attr-defined]
                parameter.main_grad.zero_()  # type: ignore[attr-defined]

    def _restart_accumulation(self) -> None:
        for parameter in self.parameters.values():
            parameter.accumulation.begun = False  # type: ignore[attr-defined]

    def _bind_gradient(self) -> None:
        """Make the `main_grad` of every parameter a view of the full gradient; without one, remove it."""
        full = self.storage.full_grad
        for slot in self.layout.slots:
            parameter = self.parameters[slot.parameter.name]
            if full is not None:
                parameter.main_grad = full[slot.start : slot.stop].view(parameter.shape)  # type: ignore[attr-defined]
            elif hasattr(parameter, "main_grad"):
                del parameter.main_grad


def _accumulate_into_bucket(parameter: Tensor) -> None:
    """Add a gradient computed by autograd to the bucket; layers that accumulate into `main_grad` leave `grad` None."""
    if parameter.grad is None:
        return
    accumulate_grad(parameter, parameter.grad)
    parameter.grad = None
