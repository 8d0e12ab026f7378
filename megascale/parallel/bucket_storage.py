"""Storage of a bucket's weights and gradients: what a rank keeps of them, and the collectives that reduce and gather.

    zero  storage      after the last backward      updated by a rank  before the next forward   gradient memory
    0     Replicated   all-reduce of gradients      all parameters     -                         full
    1     Sharded      reduce-scatter of gradients  its shard          all-gather of parameters  full
    2     ShardedEach  as 1, after every backward   its shard          all-gather of parameters  shard; full for the
                                                                       chunks in backward and being reduced
    3     ShardedAll   as 2                         its shard          -                         shard; full for 2 units

With zero = 3 a rank keeps its shard of the weights as well, which are gathered where they are used, and gradients are
full for the modules of two buckets (`parallel.sharded_weights`). With zero = 1 or 2 it does so for FP8 weights whose
codes are gathered instead (`keep_codes`): all ranks keep those.

With hybrid sharding these are collectives of inner ranks. At the end of a step the outer ones all-reduce the shard of
the gradient; or, if they shard the state, reduce-scatter it, and all-gather the updated weights of a shard.

With `coded` reductions the inner ranks' reduce-scatter is an exchange of FP8 codes (`parallel.coded_reduction`).

Who reduces and who shards are declared by the bucket's layout (`layout.buckets.ShardAxes`). Users acquire what they
need whole, and release it: a storage decides what that takes. Between `start_gather` and `acquire_weights` weights of
other ranks' shards are outdated; a full gradient exists from `acquire_gradient` to the end of the reduction that
`release_gradient` starts, or always.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from megascale.comm.collectives import all_gather, all_reduce, reduce_scatter
from megascale.comm.mesh import Mesh
from megascale.comm.work import COMPLETED, Work
from megascale.layout.buckets import BucketLayout
from megascale.parallel.coded_reduction import amax_of, reduce_scatter_codes

Dtypes = tuple[torch.dtype, torch.dtype]
"""The dtypes of weights and of gradients."""


class Storage(ABC):
    """The weights and gradients of a bucket on this rank. `label`: of its collectives in the event log.

    - `weights` [size, or what this rank keeps], in the compute dtype; `held`: the range of the bucket that they are
    - `group`: the ranks whose gradients are summed; `inner`, `outer`: those among whom it is done, first and last, this
      rank alone if there are none
    - `shards`: those that shard the bucket's state; `replicas`: those of `group` that update the same elements
    - `shard`: the range that this rank updates
    - `grad` [size of the shard], in the accumulation dtype: the reduced gradient; `inner_grad`: the inner ranks' sum of
      their part of the bucket, `part`, of which `grad` is a view; both are empty for frozen parameters
    - `full_grad` [size]: the gradient of this rank's micro-batches; None while there is none
    """

    full_grad: Tensor | None
    inner_grad: Tensor

    def __init__(
        self, layout: BucketLayout, mesh: Mesh, dtypes: Dtypes, device: torch.device, label: str, coded: bool
    ) -> None:
        self.layout, self.label = layout, label
        self.group = mesh.group(*layout.reduce_axes)
        self.inner, self.outer = mesh.group(*layout.inner_axes), mesh.group(*layout.outer_axes)
        self._coded = coded and self.inner.size > 1
        self.shards = mesh.group(*layout.shard_axes.state)
        self.replicas = mesh.group(*layout.replica_axes)
        self.part = layout.shard_range(self.inner.index, self.inner.size)
        self.shard = layout.state_range(self.shards.index)
        start, stop = self.held = self.part if layout.shard_axes.weight else (0, layout.numel)
        self.weights = torch.zeros(stop - start, dtype=dtypes[0], device=device)
        self._gathering = list[Work]()
        self._reducing: Work = COMPLETED
        self._summed = False  # over the outer ranks
        self._finite = torch.ones((), dtype=torch.bool, device=device)  # the gradients before their reductions
        self.full_grad, self.inner_grad = None, self.weights.new_empty(0)
        if not layout.frozen:
            self._allocate_grad(dtypes[1])
        self.grad = self.inner_grad[self.shard[0] - self.part[0] : self.shard[1] - self.part[0]]

    @property
    def shard_weights(self) -> Tensor:
        """This rank's shard of the weights, a view."""
        return self.weights[self.shard[0] - self.held[0] : self.shard[1] - self.held[0]]

    @property
    def share(self) -> tuple[int, int]:
        """The range of `shard` that this rank reads and writes for all replicas."""
        start, size = self.shard[0], (self.shard[1] - self.shard[0]) // self.replicas.size
        return start + self.replicas.index * size, start + (self.replicas.index + 1) * size

    @property
    def checks_vectors_only(self) -> bool:
        """True if `local_grad_finite` covers vectors (norms and biases) only."""
        return False

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        self._summed = False
        if self.group.size > 1:
            self._finite.fill_(True)

    @abstractmethod
    def start_gather(self) -> None:
        """Start to send the updated weights of this rank's shard to the ranks that need them."""

    def acquire_weights(self) -> None:
        """Wait until all weights are up to date: on a GPU the stream waits, not the host."""
        for work in self._gathering:
            work.wait()
        self._gathering.clear()

    def acquire_gradient(self) -> bool:
        """Provide a full gradient to add to; return True if it is a new one, of any values but for zeros as padding."""
        return False

    @abstractmethod
    def release_gradient(self) -> None:
        """Start the reduction of the full gradient, after the end of one in flight."""

    def finish_reduction(self) -> None:
        """Wait for a reduction in flight (on a GPU the stream waits, not the host)."""
        self._reducing.wait()
        self._reducing = COMPLETED

    def start_outer_reduction(self) -> None:
        """Start to sum over the outer ranks, once a step, after the end of its last reduction."""
        if self.outer.size == 1 or self._summed:
            return
        self._summed = True
        self.finish_reduction()
        if self.shard == self.part:
            self._reducing = all_reduce(self.outer, self.grad, label=self.label, wait=False)
        else:
            self._reducing = reduce_scatter(self.outer, self.grad, self.inner_grad, label=self.label, wait=False)

    def local_grad_finite(self) -> bool:
        """False if this rank's gradient before the reduction has a non-finite element, or a sum that overflows.

        The host waits for the device. True proves nothing where the local gradient was not read: matrices with
        `checks_vectors_only`; with zero = 1 this rank's shard, in which the sum over ranks has replaced the local
        gradient. A non-finite sum in the shard, while no other rank reports a non-finite gradient, is therefore caused
        by this rank, or by one with the same shard.
        """
        return bool(self._finite)

    def _allocate_grad(self, dtype: torch.dtype) -> None:
        self.full_grad = torch.zeros(self.layout.numel, dtype=dtype, device=self.weights.device)
        self.inner_grad = self.full_grad[slice(*self.part)]

    def _full(self) -> Tensor:
        assert self.full_grad is not None, "a backward comes before a reduction"
        return self.full_grad

    def _check(self, ranges: list[tuple[int, int]]) -> None:
        """Note if the local gradient has non-finite elements, or a sum that overflows, where a reduction overwrites or
        frees it.
        """
        for low, high in ranges if self.group.size > 1 else ():
            self._finite &= self._full()[low:high].sum().isfinite()


class Replicated(Storage):
    """Every rank has and updates all of a bucket. The local gradient is read once more, before the all-reduce."""

    def start_gather(self) -> None:
        """Send nothing: every rank has updated all weights."""

    def release_gradient(self) -> None:
        full = self._full()
        self._check([(0, self.layout.numel)])
        self.finish_reduction()
        self._reducing = all_reduce(self.group, full, label=self.label, wait=False)


class Sharded(Storage):
    """A rank updates its shard of the weights, for which it has the reduced gradient, in place of its own.

    The first `coded` elements may be gathered as FP8 codes, of which `codes`, u8 [size of the part], has this rank's:
    then a byte for every element of the bucket is gathered, and the rest of it, such as norms, in the compute dtype.
    Few shards have that, so it is a sum of bytes over the ranks, of which the others add zeros. `gathered`, u8
    [gathered_bytes]: what was gathered last, if it is kept.
    """

    coded = 0
    codes: Tensor
    gathered: Tensor | None = None

    @property
    def gathered_bytes(self) -> int:
        """The bytes of all weights as they are gathered."""
        rest = self.weights.itemsize * (self.layout.numel - self.coded)
        return rest + (self.layout.numel if self.coded else 0)

    def keep_codes(self, coded: int) -> None:
        """Gather the first `coded` elements as `codes`, which the caller writes; keep what is gathered, and of the
        weights this rank's part alone.
        """
        self.coded, self.held = coded, self.part
        self.weights = self.weights[slice(*self.part)].clone()
        self.gathered = self.weights.new_zeros(self.gathered_bytes, dtype=torch.uint8)
        self.codes = self.gathered[slice(*self.part)]

    def start_gather(self) -> None:
        if not self.coded:
            self._gathering = [all_gather(self.inner, self.weights, self.shard_weights, label=self.label, wait=False)]

    def gather_codes(self) -> None:
        """Start to gather the codes that the caller has written, and the rest, if they are kept."""
        assert self.gathered is not None, "codes are kept"
        self._gathering = self.gather_into(self.gathered)

    def gather_into(self, memory: Tensor) -> list[Work]:
        """Start to gather all weights into `memory`, u8 [gathered_bytes]."""
        self.acquire_weights()
        codes, rest = self.views(memory)
        if not self.coded:
            return [all_gather(self.inner, rest, self.weights, label=self.label, wait=False)]
        works = [all_gather(self.inner, codes, self.codes, label=self.label, wait=False)]
        if len(rest):
            (start, stop), end = self.held, self.coded
            rest.zero_()
            rest[max(0, start - end) : max(0, stop - end)] = self.weights[max(0, end - start) :]
            works.append(all_reduce(self.inner, rest.view(torch.uint8), label=f"{self.label} rest", wait=False))
        return works

    def views(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is gathered into `memory`: codes, u8 [size], if there are any, and the rest."""
        at = self.layout.numel if self.coded else 0
        return memory[:at], memory[at:].view(self.weights.dtype)

    def release_gradient(self) -> None:
        full = self._full()
        self.finish_reduction()
        self._reducing = self._reduce_scatter(self.inner_grad, full)

    def local_grad_finite(self) -> bool:
        if self._coded or self.full_grad is None:  # what was read before it was sent, or freed
            return bool(self._finite)
        low, high = self.shard
        return all(bool(grad.isfinite().all()) for grad in (self._full()[:low], self._full()[high:]))

    def _reduce_scatter(self, out: Tensor, full: Tensor) -> Work:
        """Start to sum a gradient over the inner ranks into this rank's part. For codes all of it is read, which tells
        whether it is finite.
        """
        if not self._coded:
            return reduce_scatter(self.inner, out, full, label=self.label, wait=False)
        amax = amax_of(full)
        self._finite &= amax.isfinite()
        return reduce_scatter_codes(self.inner, out, full, amax, label=self.label)


class ShardedEach(Sharded):
    """As `Sharded`, with a full gradient only from a backward to the end of its reduction: shards are added up.

    A full pass over each micro-batch's gradient for non-finite elements would be slow: only vectors (norms and biases)
    are read, or the full gradient of a bucket without vectors, but of experts nothing. A non-finite output gradient
    reaches the vectors in backward; an overflow in a wgrad GEMM or its accumulation does not, and shows in the reduced
    gradient only.
    """

    arriving: Tensor | None = None
    """The result of the reduction in flight [size of the part]."""

    _has_reduced = False  # `inner_grad` holds a reduction of this step

    @property
    def checks_vectors_only(self) -> bool:
        return self.group.size > 1 and not self._coded and (bool(self._vectors) or self.layout.has_experts)

    def begin_step(self) -> None:
        super().begin_step()
        self._has_reduced = False

    def acquire_gradient(self) -> bool:
        if self.full_grad is not None:
            return False
        with self.group.recorder.memory_kind("gradients"):
            self.full_grad = self.inner_grad.new_empty(self.layout.numel)
        for low, high in self.layout.padding:
            self.full_grad[low:high].zero_()
        return True

    def release_gradient(self) -> None:
        full = self._full()
        if not self._coded:
            self._check(self._vectors if self.checks_vectors_only else [(0, self.layout.numel)])
        self.finish_reduction()
        self.full_grad = None  # the caller drops its views: then only the work in flight holds it, and frees it
        with self.group.recorder.memory_kind("gradients"):
            self.arriving = torch.empty_like(self.inner_grad)
        self._reducing = self._reduce_scatter(self.arriving, full)

    def finish_reduction(self) -> None:
        super().finish_reduction()
        shard, self.arriving = self.arriving, None
        if shard is not None and self._has_reduced:
            self.inner_grad += shard
        elif shard is not None:
            self.inner_grad.copy_(shard)
            self._has_reduced = True

    def _allocate_grad(self, dtype: torch.dtype) -> None:
        self.full_grad = None
        self.inner_grad = torch.zeros(self.part[1] - self.part[0], dtype=dtype, device=self.weights.device)

    @property
    def _vectors(self) -> list[tuple[int, int]]:
        """The ranges of vectors: norms and biases."""
        ranges = self.layout.merged_ranges(0, self.layout.numel)
        return [(item.start, item.stop) for item in ranges if not item.slot.parameter.is_matrix]


class ShardedAll(ShardedEach):
    """As `ShardedEach`, with this rank's shard of the weights alone, of which all are gathered where they are used."""

    def keep_codes(self, coded: int) -> None:
        self.coded, self.codes = coded, self.weights.new_zeros(len(self.weights), dtype=torch.uint8)

    def start_gather(self) -> None:
        """Send what outer ranks have updated of this rank's weights."""
        if self.shard != self.held:
            self._gathering = [all_gather(self.outer, self.weights, self.shard_weights, label=self.label, wait=False)]


def build_storage(
    layout: BucketLayout, mesh: Mesh, dtypes: Dtypes, device: torch.device, label: str, coded: bool
) -> Storage:
    """Allocate a bucket as its layout places it. Weights and gradients are zero. `coded`: gradients are reduced as FP8
    codes, among ranks that shard.
    """
    axes = layout.shard_axes
    sharded = ShardedAll if axes.weight else ShardedEach if axes.gradient else Sharded
    return (sharded if axes.state else Replicated)(layout, mesh, dtypes, device, label, coded)
