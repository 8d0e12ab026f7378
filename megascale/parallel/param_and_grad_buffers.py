"""Parameter and gradient buffers: contiguous buckets, reduced, sharded and all-gathered over the data-parallel group.

A model chunk has one bucket, or several if the chunk is large (MegaScale 3.2). Gradients are reduced once per step,
after the last micro-batch's backward; with zero = 2 after every micro-batch's (`parallel.bucket_storage`).

Calls in a step: caller, call, when. A "last" backward is the last of a chunk before a reduction:

    train_step  begin_step             before the first action
    executor    wait_params            before a chunk's first forward
    executor    backward               around every backward, B or W
    executor    input_gradient         around every I
    executor    start_chunk_reduction  after a last backward
    train_step  finish_reductions      after the last action
    train_step  start_param_gather     after the update of a bucket

Reductions and all-gathers run in the background with `overlap`.

Gradients are sums over tokens, divided once, by the global token count, during clipping. Main gradients are not zeroed
at the beginning of a step: the first contribution overwrites (`parallel.grad_accumulation`), and a gradient without
contributions is zeroed before its reduction. Padding is zeroed when a buffer is allocated, and stays zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megascale.comm.collectives import all_reduce
from megascale.comm.group import single_rank_group
from megascale.comm.mesh import Mesh
from megascale.layout.buckets import pack
from megascale.layout.chunks import module_of
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, ParamSpec
from megascale.ops.wgrad import Wgrad, torch_wgrad
from megascale.parallel.bucket_storage import build_storage
from megascale.parallel.grad_accumulation import Accumulation, WeightGradients, accumulate_grad


class Bucket:
    """Parameters of a chunk in one contiguous buffer, and their gradients in another.

    - `storage`, and of it `weights`, `grad`, `shard`, `group` and `replicas` (`parallel.bucket_storage.Storage`)
    - `tied`: the bucket is the token embedding alone, which the first and last pipeline stages share if it is tied
    - `tied_group`: the ranks that share a tied embedding; of one rank otherwise
    - `users`: the number of this rank's chunks that use it, in which its gradients are complete in the last of them
    - `grad_reader`: if set, is called once, with the bucket and its full gradient [size] after the next backward

    `dtypes`: (compute, accumulation). `place`: (chunk, suffix of the bucket's name in the chunk).
    """

    def __init__(
        self, parameters: Sequence[ParamSpec], mesh: Mesh, zero: int, dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device, place: tuple[int, str], wgrad: Wgrad,
    ) -> None:  # fmt: skip
        self.chunk = place[0]
        self.label = "chunk {}{}".format(*place)  # its name in the event log
        self.first_module = module_of(parameters[0].name)
        layout = self.layout = pack(parameters, mesh.topology, zero)
        tied = self.tied = [p.name for p in parameters] == [TOKEN_EMBEDDING]
        self.tied_group = mesh.tied if tied else single_rank_group("tied")
        self._tp = mesh.tp
        storage = self.storage = build_storage(layout, mesh, dtypes, device, self.label)
        self.weights, self.grad, self.shard = storage.weights, storage.grad, storage.shard
        self.group, self.replicas = storage.group, storage.replicas
        self.parameters: dict[str, nn.Parameter] = {}
        for slot in layout.slots:
            view = self.weights[slot.start : slot.stop].view(slot.parameter.local_shape(mesh.topology))
            parameter = self.parameters[slot.parameter.name] = nn.Parameter(view)
            parameter.accumulation = Accumulation(wgrad)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_accumulate_into_bucket)
        self.grad_reader: Callable[[Bucket, Tensor], None] | None = None
        self.users = 1
        self._left_by = 0  # chunks that have left it since the last reduction
        self._bind_gradient()

    @property
    def shard_weights(self) -> Tensor:
        """This rank's shard of the weights, a view."""
        return self.storage.shard_weights

    def begin_step(self) -> None:
        """Begin a step: its first contributions overwrite the gradients of the last step."""
        self._restart_accumulation()
        self.storage.begin_step()

    def acquire_gradient(self) -> None:
        """Have a full gradient to add to, until the next reduction."""
        if self.storage.acquire_gradient():
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


@dataclass(frozen=True)
class BucketOverlap:
    """Overlap of buckets' communication. `on`: with compute; `in_backward`: reductions start in a chunk's backward.

    Without `in_backward` they start after it: where only some of the data-parallel ranks run a backward together, one
    that waits in it for a reduction may wait for a rank that waits for this backward.
    """

    on: bool
    in_backward: bool = True


class ParamAndGradBuffers:
    """The buckets of this rank's model chunks (`layout.chunks.chunk_buckets`), and their overlap with compute.

    In Megatron-LM a bucket is a slice of a buffer; here a bucket has two buffers of its own, weights and gradients.
    A bucket group: the buckets of a chunk with the same first module. The executor waits for the first group and
    launches its reduction, a bucket boundary inside the chunk does so for a later group. Backward runs right to left:

        forward  -->  wait_params            [modules of group 0]  boundary: wait for group 1  [modules of group 1]
        backward <--  start_chunk_reduction  [modules of group 0]  boundary: reduce group 1    [modules of group 1]
    """

    def __init__(
        self, chunks: Sequence[Sequence[Sequence[ParamSpec]]], mesh: Mesh, *, zero: int, sequence: bool,
        overlap: BucketOverlap, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device,
        wgrad: Wgrad = torch_wgrad,
    ) -> None:  # fmt: skip
        self._sequence = sequence
        self._overlap = overlap
        self._last_backward = False  # the current backward is its chunk's last before a reduction
        self._left: WeightGradients | None = None  # in an I: the work for its W
        self._in_reduction: deque[Bucket] = deque()  # buckets with a reduction in flight, the oldest first
        self.chunks = [
            [
                Bucket(parameters, mesh, zero, dtypes, device, (chunk, f".{i}" if len(buckets) > 1 else ""), wgrad)
                for i, parameters in enumerate(buckets)
            ]
            for chunk, buckets in enumerate(chunks)
        ]
        # By chunk: module name -> the bucket group that the module is the first to use.
        self._by_first_module = [_group_by_first_module(buckets) for buckets in self.chunks]

    def share_embedding(self, chunks: Sequence[int]) -> None:
        """Let all of `chunks` use the token embedding, which is in a bucket of the first."""
        for chunk in chunks[1:]:
            (shared,) = (bucket for bucket in self.chunks[chunks[0]] if TOKEN_EMBEDDING in bucket.parameters)
            shared.users += 1
            self.chunks[chunk].append(shared)
            self._by_first_module[chunk] = _group_by_first_module(self.chunks[chunk])

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets in the order in which forwards need them: first those that stages share, of the vocabulary."""
        buckets = dict.fromkeys(bucket for chunk in self.chunks for bucket in chunk)
        return sorted(buckets, key=lambda bucket: not bucket.layout.shares_vocabulary)

    def parameters(self, chunk: int) -> dict[str, nn.Parameter]:
        """The parameters of a chunk by name."""
        return {name: p for bucket in self.chunks[chunk] for name, p in bucket.parameters.items()}

    def shards(self) -> Iterator[tuple[nn.Parameter, ParamSpec]]:
        """Yield this rank's shard of each parameter."""
        for bucket in self.buckets:
            yield from ((bucket.parameters[slot.parameter.name], slot.parameter) for slot in bucket.layout.slots)

    def begin_step(self) -> None:
        """Begin a step: its first contributions overwrite the gradients of the last step."""
        for bucket in self.buckets:
            bucket.begin_step()

    def wait_params(self, chunk: int) -> None:
        """Wait for the all-gather of the weights of a chunk's first bucket group, before a forward of the chunk."""
        for bucket in next(iter(self._by_first_module[chunk].values()), ()):
            bucket.storage.acquire_weights()

    def make_bucket_boundary(self, chunk: int) -> Callable[[str, Tensor], Tensor]:
        """Return boundary(module, x) -> x, for the chunk's forward to call with the name and the input of a module.

        At the first module of a bucket group the boundary waits for the group's weights, and in a last backward starts
        its reduction; for the first group of the chunk the executor does so. The first boundary of a forward with
        losses acquires the gradients of their heads, to which the fused loss adds in forward
        (`parallel.linear_cross_entropy`).
        """
        boundaries = dict(list(self._by_first_module[chunk].items())[1:])
        by_name = {name: bucket for bucket in self.chunks[chunk] for name in bucket.parameters}
        tied = HEAD not in by_name and any(module_of(name) == module_of(HEAD) for name in by_name)
        heads = [b for name, b in by_name.items() if name.endswith(HEAD) or (tied and name == TOKEN_EMBEDDING)]

        def boundary(module: str, x: Tensor) -> Tensor:
            missing = [head for head in dict.fromkeys(heads) if head.storage.full_grad is None]
            if missing and torch.is_grad_enabled():
                self._acquire_gradients(missing)
            return _BucketBoundary.apply(x, self, boundaries[module]) if module in boundaries else x

        return boundary

    @contextmanager
    def backward(self, chunk: int, *, last: bool) -> Iterator[None]:
        """Have full gradients in a backward of a chunk, and let readers read them before the next micro-batch adds.
        `last`: the chunk's last backward before a reduction.
        """
        self._last_backward = last
        self._acquire_gradients(self.chunks[chunk])
        yield
        for bucket in self.chunks[chunk]:
            bucket.read_full_grad()

    @contextmanager
    def input_gradient(self, chunk: int, left: WeightGradients) -> Iterator[None]:
        """Leave the work on the gradients of a chunk's weights, of a backward inside, in a queue for its W."""
        self._left = left
        accumulations = [
            parameter.accumulation  # type: ignore[attr-defined]
            for parameter in self.parameters(chunk).values()
        ]
        for accumulation in accumulations:
            accumulation.left = left
        yield
        self._left = None
        for accumulation in accumulations:
            accumulation.left = None

    def leave_modules(self, buckets: Sequence[Bucket]) -> None:
        """Launch the reduction of buckets whose modules the current backward has left, if it is a last backward."""
        if self._left is not None:
            self._left.add(lambda: self.leave_modules(buckets))
        elif self._last_backward and self._overlap.in_backward:
            self._start_reductions(buckets)

    def start_chunk_reduction(self, chunk: int) -> None:
        """Launch the reduction of a chunk's first bucket group after a last backward, or of all that it left."""
        groups = list(self._by_first_module[chunk].values())
        for buckets in groups[:1] if self._overlap.in_backward else reversed(groups):
            self._start_reductions(buckets)

    def finish_reductions(self) -> Iterator[Bucket]:
        """Finish and yield each bucket once its `grad` is final, the oldest reduction first; must be exhausted.

        A tied embedding comes last, because its sum waits for the other end of the pipeline.
        """
        finished = [bucket for bucket in self.buckets if bucket not in self._in_reduction]  # without overlap: all
        order = sorted([*self._in_reduction, *finished], key=lambda bucket: bucket.tied)
        self._in_reduction.clear()
        for bucket in order:
            bucket.storage.finish_reduction()
            with bucket.group.recorder.scope(bucket.chunk):
                bucket.reduce_partial_grads(sequence=self._sequence)
            yield bucket

    def start_param_gather(self, bucket: Bucket) -> None:
        """Start the all-gather of a bucket's updated weights. Call in the order in which forwards need the buckets."""
        with bucket.group.recorder.scope(bucket.chunk):
            bucket.storage.start_gather()
        if not self._overlap.on:
            bucket.storage.acquire_weights()

    def finish_param_gather(self) -> None:
        """Wait until all weights are complete."""
        for bucket in self.buckets:
            bucket.storage.acquire_weights()

    def _acquire_gradients(self, buckets: Sequence[Bucket]) -> None:
        """Have full gradients. Before an allocation wait until at most one chunk's reduction is in flight, to bound
        memory.
        """
        frees = any(bucket.layout.shard_axes.gradient for bucket in buckets)
        while frees and self._in_reduction and self._in_reduction[0].chunk != self._in_reduction[-1].chunk:
            self._in_reduction.popleft().storage.finish_reduction()
        for bucket in buckets:
            bucket.acquire_gradient()

    def _start_reductions(self, buckets: Sequence[Bucket]) -> None:
        for bucket in (bucket for bucket in buckets if bucket.leave()):
            bucket.start_reduction()
            if bucket in self._in_reduction:  # queued by an earlier micro-batch; start_reduction has waited for it
                self._in_reduction.remove(bucket)
            self._in_reduction.append(bucket)
        while self._in_reduction and not self._overlap.on:
            self._in_reduction.popleft().storage.finish_reduction()


class _BucketBoundary(torch.autograd.Function):
    """The identity, before the first module of a bucket group inside a chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffers: ParamAndGradBuffers, buckets: Sequence[Bucket]) -> Tensor:
        for bucket in buckets:
            bucket.storage.acquire_weights()
        ctx.buffers, ctx.buckets = buffers, buckets
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Later modules' gradients are complete: autograd accumulates gradients before it runs other nodes.
        ctx.buffers.leave_modules(ctx.buckets)
        return grads[0], None, None


def _group_by_first_module(buckets: Sequence[Bucket]) -> dict[str, list[Bucket]]:
    """Return the bucket groups of a chunk by their first module, in network order."""
    groups: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        # A tied embedding after other buckets is the last stage's copy, the weight of the head.
        first = module_of(HEAD) if bucket.tied and groups else bucket.first_module
        groups.setdefault(first, []).append(bucket)
    return groups
