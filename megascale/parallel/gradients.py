"""Weights and gradients of this rank in contiguous buckets, reduced, sharded and gathered over data parallelism.

ZeRO (Rajbhandari et al. 2020), a model chunk at a time as in MegaScale 3.2, a large one in several buckets: with
zero = 0 gradients are all-reduced and every rank updates all weights; with 1 they are reduce-scattered, each rank
updates its contiguous shard, and the weights are all-gathered; with 2 the whole gradient exists only during a backward,
and the sum over micro-batches is kept as a shard. Gradients are sums over tokens: they are divided once, by the global
number of tokens, when they are clipped.

Nothing is zeroed at the beginning of a step: the first part of each sum is written over what is there
(`parallel.weights`), and what no part has come to is zeroed before it is reduced. Padding is zero from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megascale.comm.collectives import all_gather, all_reduce, reduce_scatter
from megascale.comm.group import alone
from megascale.comm.mesh import Mesh
from megascale.comm.pending import DONE, Awaitable
from megascale.layout import buckets as layouts
from megascale.layout.chunks import unit
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, Parameter
from megascale.ops.wgrad import Wgrad, torch_wgrad
from megascale.parallel.weights import Accumulation, add_gradient


class Bucket:
    """One contiguous run of parameters.

    `weights` [size], in the format of compute; `shard`: the range that this rank updates (everything with zero = 0);
    `grad` [size of the shard]: its gradient after a reduction. `counts`: whether this rank's copy enters the global
    norm, false for the second copy of a tied embedding. `place`: its chunk, and which bucket of the chunk it is.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        mesh: Mesh,
        zero: int,
        formats: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        place: tuple[int, str],
        wgrad: Wgrad,
    ) -> None:
        self.chunk = place[0]
        self.what = "chunk {}{}".format(*place)  # its name in the ledger
        self.first_unit = unit(parameters[0].name)
        compute, self._accumulate = formats
        layout = self.layout = layouts.pack(parameters, mesh.topology)
        tied = self.tied = [p.name for p in parameters] == [TOKEN_EMBEDDING]
        self.zero = zero
        self.counts = not tied or mesh.tied.index == 0
        self.group = mesh.over(*layout.axes)
        self._tp = mesh.tp
        self._tied = mesh.tied if tied else alone("tied")
        self.weights = torch.zeros(layout.size, dtype=compute, device=device)
        self.shard = layout.shard(self.group.index) if zero else (0, layout.size)
        self.parameters: dict[str, nn.Parameter] = {}
        for slot in layout.slots:
            view = self.weights[slot.start : slot.stop].view(slot.parameter.local_shape(mesh.topology))
            parameter = self.parameters[slot.parameter.name] = nn.Parameter(view)
            parameter.accumulation = Accumulation(wgrad)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_into_bucket)
        self._full: Tensor | None = None
        self._begun = False  # whether `grad` holds a part of this step's sum, with zero = 2
        self._reducing: tuple[Awaitable, Tensor | None] = (DONE, None)
        self._gathering: Awaitable = DONE
        self._finite = torch.ones((), dtype=torch.bool, device=device)  # what `_look` has seen
        if zero == 2:
            self.grad = torch.zeros(self.shard[1] - self.shard[0], dtype=self._accumulate, device=device)
        else:
            full = torch.zeros(layout.size, dtype=self._accumulate, device=device)
            self._bind(full)
            self.grad = full[slice(*self.shard)]

    @property
    def shard_weights(self) -> Tensor:
        """This rank's shard of the weights, a view."""
        return self.weights[slice(*self.shard)]

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that stay allocated: weights and gradients."""
        return {"weights": self.weights.nbytes, "gradients": (self.grad if self._full is None else self._full).nbytes}

    def clear(self) -> None:
        """Forget the gradients of the last step: what comes first is written over them."""
        self._forget()
        self._begun = False
        if self._looks:
            self._finite.fill_(True)

    def make_room(self) -> None:
        """With zero = 2: a whole gradient until the next reduction, unless there is one."""
        if self._full is None:
            with self.group.recorder.memory("gradients"):
                full = torch.empty(self.layout.size, dtype=self._accumulate, device=self.weights.device)
            for low, high in self.layout.padding:
                full[low:high].zero_()
            self._bind(full)
            self._forget()

    def reduce(self) -> None:
        """Start the sum over data parallelism of the gradients accumulated since the last one."""
        full = self._full
        assert full is not None, "a backward comes before the reduction of its gradients"
        for parameter in self.parameters.values():
            if not parameter.accumulation.begun:  # type: ignore[attr-defined]
                parameter.main_grad.zero_()  # type: ignore[attr-defined]
        if self._looks:
            self._look(full)
        self.finish_reduction()
        if self.zero == 0:
            self._reducing = (all_reduce(self.group, full, what=self.what, wait=False), None)
        elif self.zero == 1:
            self._reducing = (reduce_scatter(self.group, self.grad, full, what=self.what, wait=False), None)
        else:
            self._unbind()
            with self.group.recorder.memory("gradients"):
                part = torch.empty_like(self.grad)
            self._reducing = (reduce_scatter(self.group, part, full, what=self.what, wait=False), part)

    def finish_reduction(self) -> None:
        """Wait for the reduction under way, if any."""
        pending, part = self._reducing
        self._reducing = (DONE, None)
        pending.wait()
        if part is not None and self._begun:
            self.grad += part
        elif part is not None:
            self.grad.copy_(part)
            self._begun = True

    def sum_partial(self, *, sequence: bool) -> None:
        """Sum what data parallelism leaves partial: over the pipeline's ends a tied embedding's gradient, and with
        sequence parallelism over tp those of the parameters that every tp rank holds whole, which have seen a part of
        the tokens.
        """
        if sequence and self._tp.size > 1:
            low, high = (min(max(edge, self.shard[0]), self.shard[1]) for edge in self.layout.whole)
            if low < high:
                all_reduce(self._tp, self.grad[low - self.shard[0] : high - self.shard[0]], what=f"{self.what} norms")
        all_reduce(self._tied, self.grad, what=self.what)

    def start_gather(self) -> None:
        """Start collecting the weights that the other ranks have updated."""
        if self.zero:
            with self.group.recorder.place(self.chunk):
                self._gathering = all_gather(self.group, self.weights, self.shard_weights, what=self.what, wait=False)

    def finish_gather(self) -> None:
        self._gathering.wait()
        self._gathering = DONE

    def finite_before(self) -> bool:
        """Whether this rank's own part of the gradient was finite, asked for after the sum over data parallelism. The
        host waits for the device.

        With zero = 1 a reduce-scatter has left the other ranks' shards of it as they were. About this rank's shard of
        it nothing is known: if the sum there is not finite, and no other rank's part was, it was this rank's.
        """
        if self.zero == 1 and self._full is not None:
            low, high = self.shard
            return all(bool(part.isfinite().all()) for part in (self._full[:low], self._full[high:]))
        return bool(self._finite)

    @property
    def blind(self) -> bool:
        """Whether `finite_before` speaks of norms and biases only."""
        return self.zero == 2 and self._looks and bool(self._vectors)

    @property
    def _looks(self) -> bool:
        """Whether a reduction leaves nothing by which one could tell whose gradient was not finite."""
        return self.zero != 1 and self.group.size > 1

    @property
    def _vectors(self) -> list[tuple[int, int]]:
        """The ranges of norms and biases."""
        runs = self.layout.runs(0, self.layout.size)
        return [(low, high) for slot, low, high in runs if not slot.parameter.is_matrix]

    def _look(self, full: Tensor) -> None:
        """With zero = 0 look at the whole gradient before its sum, in a pass of its own, once a step. With zero = 2,
        where that would be a pass for each micro-batch, look at norms and biases, which whatever is wrong in the
        backward goes through; at everything if there are none.
        """
        for low, high in self._vectors if self.blind else [(0, self.layout.size)]:
            self._finite &= full[low:high].sum().isfinite()

    def _forget(self) -> None:
        for parameter in self.parameters.values():
            parameter.accumulation.begun = False  # type: ignore[attr-defined]

    def _bind(self, full: Tensor) -> None:
        """Let the parameters' gradients accumulate in `full` [size]."""
        self._full = full
        for slot in self.layout.slots:
            parameter = self.parameters[slot.parameter.name]
            parameter.main_grad = full[slot.start : slot.stop].view(parameter.shape)  # type: ignore[attr-defined]

    def _unbind(self) -> None:
        self._full = None
        for parameter in self.parameters.values():
            del parameter.main_grad  # type: ignore[attr-defined]


def _into_bucket(parameter: Tensor) -> None:
    """A gradient that autograd formed moves into the bucket; there is none where `parallel.weights` has added it
    already.
    """
    if parameter.grad is None:
        return
    add_gradient(parameter, parameter.grad)
    parameter.grad = None


class Gradients:
    """The buckets of this rank's chunks (`layout.chunks.chunk_buckets`).

    A bucket's weights are waited for where the network first needs them, and its gradients are reduced where the last
    backward has left them: at the edges of the chunk, or inside it at a crossing.
    """

    def __init__(
        self, chunks: Sequence[Sequence[Sequence[Parameter]]], mesh: Mesh, *, zero: int, sequence: bool, overlap: bool,
        formats: tuple[torch.dtype, torch.dtype], device: torch.device, wgrad: Wgrad = torch_wgrad,
    ) -> None:  # fmt: skip
        self._zero = zero
        self._sequence = sequence
        self._overlap = overlap
        self._completing = False  # the backward that runs is its chunk's last before a reduction
        self._reducing: deque[Bucket] = deque()  # the oldest reduction first
        self.chunks = [
            [
                Bucket(parameters, mesh, zero, formats, device, (chunk, f".{i}" if len(cut) > 1 else ""), wgrad)
                for i, parameters in enumerate(cut)
            ]
            for chunk, cut in enumerate(chunks)
        ]
        self._starts = [_by_first_unit(buckets) for buckets in self.chunks]

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for chunk in self.chunks for bucket in chunk]

    def parameters(self, chunk: int) -> dict[str, nn.Parameter]:
        """The parameters of a chunk by name."""
        return {name: p for bucket in self.chunks[chunk] for name, p in bucket.parameters.items()}

    def clear(self) -> None:
        """Begin a step: no gradients."""
        for bucket in self.buckets:
            bucket.clear()

    def enter(self, chunk: int) -> None:
        """A forward of this chunk follows: wait for the weights that it begins with."""
        for bucket in next(iter(self._starts[chunk].values()), ()):
            bucket.finish_gather()

    def crossing(self, chunk: int) -> Callable[[str, Tensor], Tensor]:
        """For a chunk's forward: passes on the input of a unit, and where a bucket begins waits for its weights, and in
        the backward reduces its gradients.
        """
        edges = dict(list(self._starts[chunk].items())[1:])

        def cross(into: str, x: Tensor) -> Tensor:
            return _Crossing.apply(x, self, edges[into]) if into in edges else x

        return cross

    def begin_loss(self, chunk: int) -> None:
        """A forward of this chunk follows that ends in the loss, which already adds to the gradient of the head's
        weight. With zero = 2 this makes room for it.
        """
        if self._zero == 2:
            names = {name: bucket for bucket in self.chunks[chunk] for name in bucket.parameters}
            self._make_room([names.get(HEAD) or names[TOKEN_EMBEDDING]])

    def begin_backward(self, chunk: int, *, last: bool) -> None:
        """A backward of this chunk follows, the `last` before its reduction or not. With zero = 2 this makes room for
        its gradient.
        """
        self._completing = last
        if self._zero == 2:
            self._make_room(self.chunks[chunk])

    def complete(self, buckets: Sequence[Bucket]) -> None:
        """The backward that runs has left these buckets: if it is the last, start to reduce them."""
        if self._completing:
            self._reduce(buckets)

    def reduce(self, chunk: int) -> None:
        """The gradients of a chunk are complete: sum what is not yet being summed over data parallelism, in the
        background if overlapped.
        """
        self._reduce(next(iter(self._starts[chunk].values()), ()))

    def finish(self) -> Iterator[Bucket]:
        """The buckets, each when the gradient of this rank's shard is the sum over the whole job. Those that wait for
        the other end of the pipeline come last.
        """
        others = [bucket for bucket in self.buckets if bucket not in self._reducing]
        order = sorted([*self._reducing, *others], key=lambda bucket: bucket.tied)
        self._reducing.clear()
        for bucket in order:
            bucket.finish_reduction()
            with bucket.group.recorder.place(bucket.chunk):
                bucket.sum_partial(sequence=self._sequence)
            yield bucket

    def start_gather(self, bucket: Bucket) -> None:
        """Begin to collect a bucket's updated weights. Buckets are started in the order in which they are needed."""
        bucket.start_gather()
        if not self._overlap:
            bucket.finish_gather()

    def finish_gather(self) -> None:
        """Wait until all weights are complete."""
        for bucket in self.buckets:
            bucket.finish_gather()

    def _make_room(self, buckets: Sequence[Bucket]) -> None:
        """Room for whole gradients: that of one chunk may still be being reduced, no more."""
        while self._reducing and self._reducing[0].chunk != self._reducing[-1].chunk:
            self._reducing.popleft().finish_reduction()
        for bucket in buckets:
            bucket.make_room()

    def _reduce(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.reduce()
            if bucket in self._reducing:  # the sum of an earlier micro-batch, which it has waited for
                self._reducing.remove(bucket)
            self._reducing.append(bucket)
        while self._reducing and not self._overlap:
            self._reducing.popleft().finish_reduction()


class _Crossing(torch.autograd.Function):
    """The identity between two buckets of a chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: Gradients, ahead: Sequence[Bucket]) -> Tensor:
        for bucket in ahead:
            bucket.finish_gather()
        ctx.complete = lambda: gradients.complete(ahead)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.complete()  # what lies ahead has added its gradients: autograd accumulates before it goes on
        return grads[0], None, None


def _by_first_unit(buckets: Sequence[Bucket]) -> dict[str, list[Bucket]]:
    """The buckets that begin with each unit, in the order of the network. At its end a tied embedding is the head."""
    starts: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        first = "head" if bucket.tied and starts else bucket.first_unit
        starts.setdefault(first, []).append(bucket)
    return starts
