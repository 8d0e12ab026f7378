"""Parameter and gradient buffers: contiguous buckets, reduced, sharded and all-gathered over the data-parallel group.

A model chunk has one bucket, or several if the chunk is large (MegaScale 3.2). Gradients are reduced once per step,
after the last micro-batch's backward; with zero = 2 after every micro-batch's. ZeRO (Rajbhandari et al. 2020):

    zero  after the last backward      updated by a rank    before the next forward   gradient memory
    0     all-reduce of gradients      all parameters       -                         full
    1     reduce-scatter of gradients  its shard            all-gather of parameters  full
    2     as 1, after every backward   its shard            all-gather of parameters  shard; full for the chunks in
                                                                                      backward and being reduced

Calls in a step: caller, call, when. A "last" backward is the last of a chunk before a reduction:

    train_step        begin_step             before the first action
    executor          wait_params            before a chunk's first forward
    executor          prepare_loss           before a forward that ends in the loss
    executor          prepare_backward       before every backward
    bucket boundary   grads_ready            in a last backward, when it leaves the modules of a bucket group
    executor          end_backward           after every backward
    executor          start_chunk_reduction  after a last backward
    train_step        finish_reductions      after the last action
    train_step        start_param_gather     after the update of a bucket

Reductions and all-gathers run in the background with `overlap`.

Gradients are sums over tokens, divided once, by the global token count, during clipping. Main gradients are not zeroed
at the beginning of a step: the first contribution overwrites (`parallel.grad_accumulation`), and a gradient without
contributions is zeroed before its reduction. Padding is zeroed when a buffer is allocated, and stays zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megascale.comm.collectives import all_gather, all_reduce, reduce_scatter
from megascale.comm.group import single_rank_group
from megascale.comm.mesh import Mesh
from megascale.comm.work import COMPLETED, Work
from megascale.layout import buckets as layouts
from megascale.layout.chunks import module_of
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, ParamSpec
from megascale.ops.wgrad import Wgrad, torch_wgrad
from megascale.parallel.grad_accumulation import Accumulation, accumulate_grad


class Bucket:
    """Parameters of a chunk in one contiguous buffer, and their gradients in another.

    - `weights` [size], in the compute dtype.
    - `shard`: the range that this rank updates; everything with zero = 0.
    - `grad` [size of the shard], in the accumulation dtype: the reduced gradient.
    - `tied`: the bucket is the token embedding alone, which the first and last pipeline stages share if it is tied.
    - `counts_in_norm`: this rank's copy enters the global norm; False for the second copy of a tied embedding.
    - `tied_group`: the ranks that share a tied embedding; of one rank otherwise.
    - `grad_reader`: if set, is called once, with the bucket and its full gradient [size] after the next backward.

    `dtypes`: (compute, accumulation). `place`: (chunk, suffix of the bucket's name in the chunk).
    """

    def __init__(
        self, parameters: Sequence[ParamSpec], mesh: Mesh, zero: int, dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device, place: tuple[int, str], wgrad: Wgrad,
    ) -> None:  # fmt: skip
        self.chunk = place[0]
        self.label = "chunk {}{}".format(*place)  # its name in the event log
        self.first_module = module_of(parameters[0].name)
        compute, self._accumulate = dtypes
        layout = self.layout = layouts.pack(parameters, mesh.topology)
        tied = self.tied = [p.name for p in parameters] == [TOKEN_EMBEDDING]
        self.zero = zero
        self.counts_in_norm = not tied or mesh.tied.index == 0
        self.group = mesh.get_group(*layout.axes)  # the data-parallel group: dp, and cp
        self._tp = mesh.tp
        self.tied_group = mesh.tied if tied else single_rank_group("tied")
        self.weights = torch.zeros(layout.numel, dtype=compute, device=device)
        self.shard = layout.shard_range(self.group.index) if zero else (0, layout.numel)
        self.parameters: dict[str, nn.Parameter] = {}
        for slot in layout.slots:
            view = self.weights[slot.start : slot.stop].view(slot.parameter.local_shape(mesh.topology))
            parameter = self.parameters[slot.parameter.name] = nn.Parameter(view)
            parameter.accumulation = Accumulation(wgrad)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_accumulate_into_bucket)
        self.grad_reader: Callable[[Bucket, Tensor], None] | None = None
        self._full_grad: Tensor | None = None
        self._has_reduced_grad = False  # with zero = 2: `grad` holds a reduction of this step
        self._reduction: tuple[Work, Tensor | None] = (COMPLETED, None)  # in flight, and with zero = 2 its result
        self._gathering: Work = COMPLETED
        self._finite = torch.ones((), dtype=torch.bool, device=device)  # the result of `_check_local_grad`
        if zero == 2:
            self.grad = torch.zeros(self.shard[1] - self.shard[0], dtype=self._accumulate, device=device)
        else:
            full = torch.zeros(layout.numel, dtype=self._accumulate, device=device)
            self._bind(full)
            self.grad = full[slice(*self.shard)]

    @property
    def shard_weights(self) -> Tensor:
        """This rank's shard of the weights, a view."""
        return self.weights[slice(*self.shard)]

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of the weight and gradient buffers; with zero = 2 between steps, without full gradients."""
        return {
            "weights": self.weights.nbytes,
            "gradients": (self.grad if self._full_grad is None else self._full_grad).nbytes,
        }

    def begin_step(self) -> None:
        """Begin a step: its first contributions overwrite the gradients of the last step."""
        self._restart_accumulation()
        self._has_reduced_grad = False
        if self._must_check_local_grad:
            self._finite.fill_(True)

    def allocate_full_grad(self) -> None:
        """With zero = 2, allocate the full gradient buffer unless it exists; the next reduction frees it."""
        if self._full_grad is None:
            with self.group.recorder.memory_kind("gradients"):
                full = torch.empty(self.layout.numel, dtype=self._accumulate, device=self.weights.device)
            for low, high in self.layout.padding:
                full[low:high].zero_()
            self._bind(full)
            self._restart_accumulation()

    def start_reduction(self) -> None:
        """Start the data-parallel reduction of the gradients accumulated since the last reduction."""
        full = self._full_grad
        assert full is not None, "a backward comes before a reduction"
        self._zero_missing_grads()
        self.read_full_grad()  # a reduction may begin within a backward
        if self._must_check_local_grad:
            self._check_local_grad(full)
        self.finish_reduction()  # at most one reduction in flight
        if self.zero == 0:
            self._reduction = (all_reduce(self.group, full, label=self.label, wait=False), None)
        elif self.zero == 1:  # in place: `grad` is a view of `full`
            self._reduction = (reduce_scatter(self.group, self.grad, full, label=self.label, wait=False), None)
        else:
            self._unbind()  # from here only the work in flight holds `full`, and frees it at its end
            with self.group.recorder.memory_kind("gradients"):
                shard = torch.empty_like(self.grad)
            self._reduction = (reduce_scatter(self.group, shard, full, label=self.label, wait=False), shard)

    def read_full_grad(self) -> None:
        """Call `grad_reader`, if one is set, with the gradients accumulated so far; not after their reduction."""
        if self.grad_reader is not None and self._full_grad is not None:
            self._zero_missing_grads()
            self.grad_reader(self, self._full_grad)
            self.grad_reader = None

    def finish_reduction(self) -> None:
        """Wait for a reduction in flight (on a GPU the stream waits, not the host). With zero = 2, add it to `grad`."""
        pending, shard = self._reduction
        self._reduction = (COMPLETED, None)
        pending.wait()
        if shard is not None and self._has_reduced_grad:
            self.grad += shard
        elif shard is not None:
            self.grad.copy_(shard)
            self._has_reduced_grad = True

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

    def start_param_gather(self) -> None:
        """Start the all-gather of the updated weights, with zero >= 1."""
        if self.zero:
            with self.group.recorder.scope(self.chunk):
                self._gathering = all_gather(self.group, self.weights, self.shard_weights, label=self.label, wait=False)

    def finish_param_gather(self) -> None:
        """Wait for the all-gather of the weights in flight, if any: on a GPU the stream waits, not the host."""
        self._gathering.wait()
        self._gathering = COMPLETED

    def local_grad_finite(self) -> bool:
        """False if this rank's gradient before the reduction has a non-finite element, or a sum that overflows.

        The host waits for the device. True proves nothing where the local gradient was not read: matrices with
        `checks_vectors_only`; with zero = 1 this rank's shard, in which the sum over ranks has replaced the local
        gradient. A non-finite sum in the shard, while no other rank reports a non-finite gradient, is therefore caused
        by this rank.
        """
        if self.zero == 1:
            assert self._full_grad is not None, "with zero = 1 the full gradient is always allocated"
            low, high = self.shard
            return all(bool(grad.isfinite().all()) for grad in (self._full_grad[:low], self._full_grad[high:]))
        return bool(self._finite)

    @property
    def checks_vectors_only(self) -> bool:
        """True if `local_grad_finite` covers vectors (norms and biases) only."""
        return self.zero == 2 and self._must_check_local_grad and bool(self._vectors)

    @property
    def _must_check_local_grad(self) -> bool:
        """True if the reduction overwrites or frees the local gradient: it must be checked before the reduction."""
        return self.zero != 1 and self.group.size > 1

    @property
    def _vectors(self) -> list[tuple[int, int]]:
        """The ranges of vectors: norms and biases."""
        ranges = self.layout.merged_ranges(0, self.layout.numel)
        return [(low, high) for slot, low, high in ranges if not slot.parameter.is_matrix]

    def _check_local_grad(self, full: Tensor) -> None:
        """Check the local gradient for non-finite elements before its reduction.

        With zero = 0 the full gradient is read, once per step. With zero = 2 a full pass per micro-batch would be slow:
        only vectors (norms and biases) are read, or the full gradient of a bucket without vectors. A non-finite output
        gradient reaches the vectors in backward; an overflow in a wgrad GEMM or its accumulation does not, and shows in
        the reduced gradient only. Finite elements whose sum overflows count as non-finite.
        """
        for low, high in self._vectors if self.checks_vectors_only else [(0, self.layout.numel)]:
            self._finite &= full[low:high].sum().isfinite()

    def _zero_missing_grads(self) -> None:
        """Zero the gradients without contributions since the last reduction."""
        for parameter in self.parameters.values():
            if not parameter.accumulation.begun:  # type: ignore[attr-defined]
                parameter.main_grad.zero_()  # type: ignore[attr-defined]

    def _restart_accumulation(self) -> None:
        for parameter in self.parameters.values():
            parameter.accumulation.begun = False  # type: ignore[attr-defined]

    def _bind(self, full: Tensor) -> None:
        """Make the `main_grad` of every parameter a view of `full` [size]."""
        self._full_grad = full
        for slot in self.layout.slots:
            parameter = self.parameters[slot.parameter.name]
            parameter.main_grad = full[slot.start : slot.stop].view(parameter.shape)  # type: ignore[attr-defined]

    def _unbind(self) -> None:
        self._full_grad = None
        for parameter in self.parameters.values():
            del parameter.main_grad  # type: ignore[attr-defined]


def _accumulate_into_bucket(parameter: Tensor) -> None:
    """Add a gradient computed by autograd to the bucket; layers that accumulate into `main_grad` leave `grad` None."""
    if parameter.grad is None:
        return
    accumulate_grad(parameter, parameter.grad)
    parameter.grad = None


@dataclass(frozen=True)
class Overlap:
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
        overlap: Overlap, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device, wgrad: Wgrad = torch_wgrad,
    ) -> None:  # fmt: skip
        self._zero = zero
        self._sequence = sequence
        self._overlap = overlap
        self._last_backward = False  # the current backward is its chunk's last before a reduction
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

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for chunk in self.chunks for bucket in chunk]

    def parameters(self, chunk: int) -> dict[str, nn.Parameter]:
        """The parameters of a chunk by name."""
        return {name: p for bucket in self.chunks[chunk] for name, p in bucket.parameters.items()}

    def begin_step(self) -> None:
        """Begin a step: its first contributions overwrite the gradients of the last step."""
        for bucket in self.buckets:
            bucket.begin_step()

    def wait_params(self, chunk: int) -> None:
        """Wait for the all-gather of the weights of a chunk's first bucket group, before a forward of the chunk."""
        for bucket in next(iter(self._by_first_module[chunk].values()), ()):
            bucket.finish_param_gather()

    def make_bucket_boundary(self, chunk: int) -> Callable[[str, Tensor], Tensor]:
        """Return boundary(module, x) -> x, for the chunk's forward to call with the name and the input of a module.

        At the first module of a bucket group the boundary waits for the group's weights, and its backward calls
        `grads_ready`. Elsewhere, and for the first group of the chunk, it does nothing.
        """
        boundaries = dict(list(self._by_first_module[chunk].items())[1:])  # the executor handles the first group

        def boundary(module: str, x: Tensor) -> Tensor:
            return _BucketBoundary.apply(x, self, boundaries[module]) if module in boundaries else x

        return boundary

    def prepare_loss(self, chunk: int) -> None:
        """With zero = 2, allocate the full gradient of the head's bucket, before a forward that ends in the loss: the
        fused loss accumulates the head's wgrad in forward (`parallel.linear_cross_entropy`).
        """
        if self._zero == 2:
            names = {name: bucket for bucket in self.chunks[chunk] for name in bucket.parameters}
            self._allocate_full_grads([names.get(HEAD) or names[TOKEN_EMBEDDING]])

    def prepare_backward(self, chunk: int, *, last: bool) -> None:
        """With zero = 2, allocate the chunk's full gradients. `last`: the chunk's last backward before a reduction."""
        self._last_backward = last
        if self._zero == 2:
            self._allocate_full_grads(self.chunks[chunk])

    def grads_ready(self, buckets: Sequence[Bucket]) -> None:
        """Launch the reduction of buckets whose modules the current backward has left, if it is a last backward."""
        if self._last_backward and self._overlap.in_backward:
            self._start_reductions(buckets)

    def end_backward(self, chunk: int) -> None:
        """Let readers of gradients read the chunk's, before the next micro-batch adds to them."""
        for bucket in self.chunks[chunk]:
            bucket.read_full_grad()

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
            bucket.finish_reduction()
            with bucket.group.recorder.scope(bucket.chunk):
                bucket.reduce_partial_grads(sequence=self._sequence)
            yield bucket

    def start_param_gather(self, bucket: Bucket) -> None:
        """Start the all-gather of a bucket's updated weights. Call in the order in which forwards need the buckets."""
        bucket.start_param_gather()
        if not self._overlap.on:
            bucket.finish_param_gather()

    def finish_param_gather(self) -> None:
        """Wait until all weights are complete."""
        for bucket in self.buckets:
            bucket.finish_param_gather()

    def _allocate_full_grads(self, buckets: Sequence[Bucket]) -> None:
        """Allocate full gradients, after waiting until at most one chunk's reduction is in flight, to bound memory."""
        while self._in_reduction and self._in_reduction[0].chunk != self._in_reduction[-1].chunk:
            self._in_reduction.popleft().finish_reduction()
        for bucket in buckets:
            bucket.allocate_full_grad()

    def _start_reductions(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.start_reduction()
            if bucket in self._in_reduction:  # queued by an earlier micro-batch; start_reduction has waited for it
                self._in_reduction.remove(bucket)
            self._in_reduction.append(bucket)
        while self._in_reduction and not self._overlap.on:
            self._in_reduction.popleft().finish_reduction()


class _BucketBoundary(torch.autograd.Function):
    """The identity, before the first module of a bucket group inside a chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffers: ParamAndGradBuffers, buckets: Sequence[Bucket]) -> Tensor:
        for bucket in buckets:
            bucket.finish_param_gather()
        ctx.grads_ready = lambda: buffers.grads_ready(buckets)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Later modules' gradients are complete: autograd accumulates gradients before it runs other nodes.
        ctx.grads_ready()
        return grads[0], None, None


def _group_by_first_module(buckets: Sequence[Bucket]) -> dict[str, list[Bucket]]:
    """Return the bucket groups of a chunk by their first module, in network order."""
    groups: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        # A tied embedding after other buckets is the last stage's copy, the weight of the head.
        first = module_of(HEAD) if bucket.tied and groups else bucket.first_module
        groups.setdefault(first, []).append(bucket)
    return groups
