"""Parameter and gradient buffers: contiguous buckets, reduced, sharded and all-gathered over the data-parallel group.

A model chunk has one bucket, or several if the chunk is large (MegaScale 3.2). Gradients are reduced once per step,
after the last micro-batch's backward; with zero = 2 or 3 after every micro-batch's (`parallel.bucket_storage`). Copies
of a shard are summed once a step, each while its successor is reduced. With zero = 3 weights are gathered, and
gradients allocated, for two bucket groups at a time (`parallel.sharded_weights`).

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

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from megascale.comm.mesh import Mesh
from megascale.layout.chunks import module_of
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, ParamSpec
from megascale.ops.wgrad import Wgrad, torch_wgrad
from megascale.parallel.bucket import Bucket
from megascale.parallel.grad_accumulation import WeightGradients, leaving
from megascale.parallel.sharded_weights import ShardedWeights, Unit

CODED_IN_FLIGHT = 2  # most reductions of FP8 codes at once, each of which has two bytes for every element


@dataclass(frozen=True)
class BucketCommunication:
    """Communication of buckets. `overlap`: with compute; `in_backward`: reductions start in a chunk's backward;
    `coded`: gradients travel to the ranks that shard as FP8 codes (`parallel.coded_reduction`).

    Without `in_backward` they start after it: where only some of the data-parallel ranks run a backward together, one
    that waits in it for a reduction may wait for a rank that waits for this backward.
    """

    overlap: bool
    in_backward: bool = True
    coded: bool = False


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
        communication: BucketCommunication, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device,
        wgrad: Wgrad = torch_wgrad,
    ) -> None:  # fmt: skip
        self._sequence = sequence
        self._overlap, self._in_backward = communication.overlap, communication.in_backward
        self._most_in_flight = CODED_IN_FLIGHT if communication.coded else math.inf
        self._last_backward = False  # the current backward is its chunk's last before a reduction
        self._final = False  # and before the step's last one
        self._complete: Bucket | None = None  # the newest bucket whose last reduction of the step has begun
        self._left: WeightGradients | None = None  # in an I: the work for its W
        self._in_reduction: deque[Bucket] = deque()  # buckets with a reduction in flight, the oldest first
        self.chunks = [
            [
                Bucket(parameters, mesh, zero, dtypes, device, place, wgrad, communication.coded)
                for i, parameters in enumerate(buckets)
                for place in [(chunk, f".{i}" if len(buckets) > 1 else "")]
            ]
            for chunk, buckets in enumerate(chunks)
        ]
        # By chunk: module name -> the bucket group that the module is the first to use.
        self._by_first_module = [_group_by_first_module(buckets) for buckets in self.chunks]
        self._sharded: ShardedWeights | None = None

    def share_embedding(self, chunks: Sequence[int]) -> None:
        """Let all of `chunks` use the token embedding, which is in a bucket of the first."""
        for chunk in chunks[1:]:
            (shared,) = (bucket for bucket in self.chunks[chunks[0]] if TOKEN_EMBEDDING in bucket.parameters)
            shared.users += 1
            self.chunks[chunk].append(shared)
            self._by_first_module[chunk] = _group_by_first_module(self.chunks[chunk])

    def shard_weights(self, *, streams: bool) -> None:
        """Gather the weights of bucket groups for their use, as `ShardedWeights` describes. The head's group uses an
        embedding that is tied to it.
        """
        units = list[list[Unit]]()
        for chunk, groups in enumerate(self._by_first_module):
            units.append([Unit(chunk, buckets) for buckets in groups.values()])
            named = {name: bucket for bucket in self.chunks[chunk] for name in bucket.parameters}
            last = units[-1][-1]
            if _is_tied(named) and named[TOKEN_EMBEDDING] not in last.buckets:
                units[-1][-1] = Unit(chunk, [*last.buckets, named[TOKEN_EMBEDDING]])
        self._sharded = ShardedWeights(units, streams=streams, overlap=self._overlap)

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets in the order in which forwards need them: first those that stages share, of the vocabulary."""
        buckets = dict.fromkeys(bucket for chunk in self.chunks for bucket in chunk)
        return sorted(buckets, key=lambda bucket: not bucket.layout.shares_vocabulary)

    @property
    def trained(self) -> list[Bucket]:
        """The buckets with gradients, in the same order."""
        return [bucket for bucket in self.buckets if not bucket.frozen]

    def parameters(self, chunk: int) -> dict[str, nn.Parameter]:
        """The parameters of a chunk by name."""
        return {name: p for bucket in self.chunks[chunk] for name, p in bucket.parameters.items()}

    def shards(self) -> Iterator[tuple[nn.Parameter, ParamSpec]]:
        """Yield this rank's shard of each parameter."""
        for bucket in self.buckets:
            yield from bucket.shards()

    def begin_step(self) -> None:
        """Begin a step: its first contributions overwrite the gradients of the last step."""
        for bucket in self.buckets:
            bucket.begin_step()

    def wait_params(self, chunk: int, *, backward: bool = False) -> None:
        """Wait for the all-gather of the weights of a chunk's first bucket group, before a forward of the chunk; of its
        last one before a `backward`.
        """
        self._enter(chunk, -1 if backward else 0)

    def gather_weights(self, chunk: int, *, backward: bool) -> None:
        """Gather sharded weights of a chunk before a forward or a backward of it."""
        assert self._sharded is not None, "only sharded weights are gathered by the schedule"
        self._sharded.gather(chunk, backward=backward)

    def release_weights(self, chunk: int) -> None:
        """Release the gathered weights of a chunk."""
        assert self._sharded is not None, "only sharded weights are gathered by the schedule"
        self._sharded.release(chunk)

    def make_bucket_boundary(self, chunk: int) -> Callable[[str, Tensor], Tensor]:
        """Return boundary(module, x) -> x, for the chunk's forward to call with the name and the input of a module.

        At the first module of a bucket group the boundary waits for the group's weights, and in a last backward starts
        its reduction; for the first group of the chunk the executor does so. The first boundary of a forward with
        losses acquires the gradients of their heads, to which the fused loss adds in forward
        (`parallel.linear_cross_entropy`).
        """
        boundaries = dict(list(zip(self._by_first_module[chunk], count(), strict=False))[1:])
        by_name = {name: bucket for bucket in self.chunks[chunk] for name in bucket.parameters}
        tied = _is_tied(by_name)
        heads = [b for name, b in by_name.items() if name.endswith(HEAD) or (tied and name == TOKEN_EMBEDDING)]
        heads = [bucket for bucket in heads if not bucket.frozen]

        def boundary(module: str, x: Tensor) -> Tensor:
            missing = [head for head in dict.fromkeys(heads) if head.storage.full_grad is None]
            if missing and torch.is_grad_enabled():
                self._acquire_gradients(missing)
            return _BucketBoundary.apply(x, self, chunk, boundaries[module]) if module in boundaries else x

        return boundary

    @contextmanager
    def backward(self, chunk: int, *, last: bool, final: bool = False) -> Iterator[None]:
        """Have full gradients in a backward of a chunk, and let readers read them before the next micro-batch adds.
        `last`: the chunk's last backward before a reduction; `final`: before the step's last one.
        """
        self._last_backward, self._final = last, final
        self._acquire_gradients(self.chunks[chunk] if self._sharded is None else self._group(chunk, -1))
        yield
        for bucket in self.chunks[chunk]:
            bucket.read_full_grad()

    @contextmanager
    def input_gradient(self, chunk: int, left: WeightGradients) -> Iterator[None]:
        """Leave the work on the gradients of a chunk's weights, of a backward inside, in a queue for its W."""
        self._left = left
        with leaving(self.parameters(chunk).values(), left):
            yield
        self._left = None

    def enter_modules(self, chunk: int, at: int) -> None:
        """Have the weights of bucket group `at` of a chunk, whose modules a forward reaches after the group before."""
        if self._sharded is not None:
            self._sharded.leave()
        self._enter(chunk, at)

    def leave_modules(self, chunk: int, at: int) -> None:
        """Leave bucket group `at` of a chunk in a backward, and launch its reduction, if it is a last backward. Sharded
        weights of the group to come next but one set out before; in an I the gradients are left for W.
        """
        if self._sharded is not None:
            self._sharded.leave()
        if self._left is not None:
            self._left.add(lambda: self._turn_gradients(chunk, at))
        else:
            self._turn_gradients(chunk, at)
        if self._sharded is not None:
            self._enter(chunk, at - 1)

    def start_chunk_reduction(self, chunk: int) -> None:
        """Launch the reduction of a chunk's first bucket group after a last backward, or of all that it left."""
        groups = list(self._by_first_module[chunk].values())
        for buckets in groups[:1] if self._in_backward else reversed(groups):
            self._start_reductions(buckets)

    def finish_reductions(self) -> Iterator[Bucket]:
        """Finish and yield each trained bucket once its `grad` is final, the oldest reduction first; must be exhausted.

        A tied embedding comes last, because its sum waits for the other end of the pipeline.
        """
        finished = [bucket for bucket in self.trained if bucket not in self._in_reduction]  # without overlap: all
        order = sorted([*self._in_reduction, *finished], key=lambda bucket: bucket.tied)
        self._in_reduction.clear()
        self._complete = None
        for bucket in order:
            with bucket.group.recorder.scope(bucket.chunk):
                bucket.storage.start_outer_reduction()
        for bucket in order:
            bucket.storage.finish_reduction()
            with bucket.group.recorder.scope(bucket.chunk):
                bucket.reduce_partial_grads(sequence=self._sequence)
            yield bucket

    def start_param_gather(self, bucket: Bucket) -> None:
        """Start the all-gather of a bucket's weights, which are updated or loaded. Call in the order in which forwards
        need the buckets.
        """
        bucket.outdated = True
        with bucket.group.recorder.scope(bucket.chunk):
            bucket.storage.start_gather()
        if not self._overlap:
            bucket.storage.acquire_weights()

    def finish_param_gather(self) -> None:
        """Wait until all weights are complete."""
        for bucket in self.buckets:
            bucket.storage.acquire_weights()

    def _group(self, chunk: int, at: int) -> Sequence[Bucket]:
        groups = list(self._by_first_module[chunk].values())
        return groups[at] if groups else ()

    def _enter(self, chunk: int, at: int) -> None:
        """Have the weights of a bucket group: on a GPU the stream waits, not the host."""
        if self._sharded is not None:
            self._sharded.enter(chunk, at)
        for bucket in self._group(chunk, at):
            bucket.storage.acquire_weights()

    def _turn_gradients(self, chunk: int, at: int) -> None:
        """Launch the reduction of group `at`, and have the gradients of the one before it, if they are by group."""
        if self._last_backward and self._in_backward:
            self._start_reductions(self._group(chunk, at))
        if self._sharded is not None:
            self._acquire_gradients(self._group(chunk, at - 1))

    def _acquire_gradients(self, buckets: Sequence[Bucket]) -> None:
        """Have full gradients. Before an allocation wait until at most one chunk's reduction is in flight, to bound
        memory; one bucket group's if weights are sharded.
        """
        frees = any(bucket.layout.shard_axes.gradient for bucket in buckets)

        def group(bucket: Bucket) -> tuple[int, str]:
            return bucket.chunk, bucket.first_module if self._sharded is not None else ""

        while frees and self._in_reduction and group(self._in_reduction[0]) != group(self._in_reduction[-1]):
            self._in_reduction.popleft().storage.finish_reduction()
        for bucket in buckets:
            bucket.acquire_gradient()

    def _start_reductions(self, buckets: Sequence[Bucket]) -> None:
        for bucket in (bucket for bucket in buckets if not bucket.frozen and bucket.leave()):
            while len(self._in_reduction) >= self._most_in_flight:
                self._in_reduction.popleft().storage.finish_reduction()
            bucket.start_reduction()
            if bucket in self._in_reduction:  # queued by an earlier micro-batch; start_reduction has waited for it
                self._in_reduction.remove(bucket)
            self._in_reduction.append(bucket)
            if self._final and bucket.users == 1:  # the bucket before it has had a backward's time
                if self._complete is not None:
                    self._complete.storage.start_outer_reduction()
                self._complete = bucket
        while self._in_reduction and not self._overlap:
            self._in_reduction.popleft().storage.finish_reduction()


class _BucketBoundary(torch.autograd.Function):
    """The identity, before the first module of bucket group `at` of a chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffers: ParamAndGradBuffers, chunk: int, at: int) -> Tensor:
        buffers.enter_modules(chunk, at)
        ctx.buffers, ctx.place = buffers, (chunk, at)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Later modules' gradients are complete: autograd accumulates gradients before it runs other nodes.
        ctx.buffers.leave_modules(*ctx.place)
        return grads[0], None, None, None


def _is_tied(names: Collection[str]) -> bool:
    """Return True if parameters with these names have a head whose weight is the token embedding."""
    return HEAD not in names and any(module_of(name) == module_of(HEAD) for name in names)


def _group_by_first_module(buckets: Sequence[Bucket]) -> dict[str, list[Bucket]]:
    """Return the bucket groups of a chunk by their first module, in network order."""
    groups: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        # A tied embedding after other buckets is the last stage's copy, the weight of the head.
        first = module_of(HEAD) if bucket.tied and groups else bucket.first_module
        groups.setdefault(first, []).append(bucket)
    return groups
