"""Updates of master weights and optimizer state in host memory (Maurya et al. 2024, Deep Optimizer States,
arXiv:2410.21316; ZeRO-Offload, Ren et al. 2021).

A shard is worked through in sub-groups. Every k-th, k the stride, is fetched to the device, updated there and written
back, while the processor updates the others; the device rounds all master weights:

    processor            update 1          | update 2          | update 4          | update 5
    from the device      gradient 1 | gradient 2 | gradient 4 | state 3 | gradient 5 | ...
    to the device        state 3           | master 1   | master 2   | state 6 | ...
    device               round 1    | update 3   | round 2    | ...

Elements are updated by one formula at any stride, and on a processor by one kernel: then weights are equal bit for bit.
A GPU's kernels round as they do without offload, a processor's own otherwise, by an ulp of a step. Replicas are equal:
a sub-group's number, which tells where it is updated, is the same on all.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.layout.buckets import AHEAD, sub_groups
from megascale.optim.clipping import Clipping
from megascale.optim.element_updates import ElementUpdates
from megascale.optim.optimizer_shard import OptimizerShard
from megascale.optim.updates import Parts, Updates


class HostUpdates(Updates):
    """Rules of elements for all shards, whose state is in host memory. The host waits for the device in every step.

    `sub_groups`: of each shard; with True those that are updated on the device.
    """

    writes_rounded = True

    def __init__(self, parts: Parts) -> None:
        assert parts.host is not None, "the state is in host memory"
        self._buffers, self._on_device = parts.host, parts
        self._on_host = replace(parts, rules={name: OPTIMIZERS[name].load() for name in parts.rules})
        stride, numbers = parts.config.offload_stride or 0, itertools.count(1)
        self.sub_groups = list[list[tuple[OptimizerShard, bool]]]()
        for shard in parts.shards:
            own = itertools.count(1) if shard.bucket.tied else numbers  # the same on both stages of a tied embedding
            ranges = sub_groups(shard.start, shard.start + shard.grad.numel())  # none if frozen
            self.sub_groups.append([
                (shard.part(*elements), stride > 0 and number % stride == 0)
                for elements, number in zip(ranges, own, strict=False)
            ])  # fmt: skip
        grads = [group.grad.nbytes for groups in self.sub_groups for group, on_device in groups if not on_device]
        self._free = deque(self._buffers.allocate(max(grads)) for _ in range(AHEAD if grads else 0))

    def compute(self, lr: float, step: int, clipping: Clipping) -> None:
        self._clipping = replace(clipping, grad_factor=clipping.grad_factor.cpu(), skip=clipping.skip.cpu())

    def apply(self, index: int, lr: float, step: int, clipping: Clipping) -> None:
        """Update a shard. The host returns when all state is in its memory again."""
        begun = deque[Iterator[None]](), deque[Iterator[None]]()
        for group, on_device in self.sub_groups[index]:
            if len(begun[on_device]) == AHEAD:
                next(begun[on_device].popleft(), None)
            update = self._update_on_device(group, lr, step, clipping) if on_device else self._update(group, lr, step)
            next(update)
            begun[on_device].append(update)
        for update in itertools.chain(*begun):
            next(update, None)

    def _update_on_device(self, group: OptimizerShard, lr: float, step: int, clipping: Clipping) -> Iterator[None]:
        """Issue the update of a sub-group to the device; then wait until it is written back."""
        kept = [group.master, *group.state.values()]
        master, *state = fetched = [self._load(x) for x in kept]
        on_device = replace(group, master=master, state=dict(zip(group.state, state, strict=True)))
        ElementUpdates(replace(self._on_device, shards=[on_device])).apply(0, lr, step, clipping)
        on_device.copy_to_params()
        written = [self._buffers.read(x, host) for x, host in zip(fetched, kept, strict=True)]
        yield
        for wait in written:
            wait()

    def _update(self, group: OptimizerShard, lr: float, step: int) -> Iterator[None]:
        """Start to copy a sub-group's gradient; then update the sub-group on the host."""
        memory = self._free.popleft()
        on_host = replace(group, grad=memory[: group.grad.nbytes].view(group.grad.dtype))
        wait = self._buffers.read(group.grad, on_host.grad)
        yield
        wait()
        ElementUpdates(replace(self._on_host, shards=[on_host])).apply(0, lr, step, self._clipping)
        self._free.append(memory)
        replace(group, master=self._load(group.master)).copy_to_params()

    def _load(self, host: Tensor) -> Tensor:
        x, loaded = self._buffers.load(host)
        loaded()
        return x
