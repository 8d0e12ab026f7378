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
from dataclasses import replace

import torch
from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.device import Wait
from megascale.layout.buckets import AHEAD, sub_group_size
from megascale.optim.clipping import Clipping
from megascale.optim.element_updates import ElementUpdates
from megascale.optim.optimizer_shard import OptimizerShard, host_tensor
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
        size, stride = sub_group_size(parts.config.offload_subgroup), parts.config.offload_stride or 0
        self.sub_groups, numbers = list[list[tuple[OptimizerShard, bool]]](), itertools.count(1)
        for shard in parts.shards:
            own = itertools.count(1) if shard.bucket.tied else numbers  # the same on both stages of a tied embedding
            stop = shard.start + shard.grad.numel()  # no elements if frozen
            self.sub_groups.append([
                (shard.part(start, min(start + size, stop)), stride > 0 and number % stride == 0)
                for start, number in zip(range(shard.start, stop, size), own, strict=False)
            ])  # fmt: skip
        grads = [group.grad for groups in self.sub_groups for group, on_device in groups if not on_device]
        sizes = AHEAD * [max(map(Tensor.numel, grads))] if grads else []
        self._free = deque(host_tensor(self._buffers, size, grads[0].dtype) for size in sizes)
        self._clipping = host_tensor(self._buffers, 2, torch.float64)

    def compute(self, lr: float, step: int, clipping: Clipping) -> None:
        values = torch.stack([clipping.grad_factor, clipping.skip.double()])
        self._buffers.read(values, self._clipping)()

    def apply(self, index: int, lr: float, step: int, clipping: Clipping) -> None:
        """Update a shard. The host returns when all state is in its memory again."""
        begun = deque[Wait](), deque[Wait]()
        for group, on_device in self.sub_groups[index]:
            if len(begun[on_device]) == AHEAD:
                begun[on_device].popleft()()
            begin = self._begin_on_device if on_device else self._begin_on_host
            begun[on_device].append(begin(group, lr, step, clipping))
        for finish in itertools.chain(*begun):
            finish()

    def _begin_on_device(self, group: OptimizerShard, lr: float, step: int, clipping: Clipping) -> Wait:
        """Issue the update of a sub-group to the device; the returned function waits until it is written back."""
        kept = [group.master, *group.state.values()]
        loads = [self._buffers.load(x, x.shape, x.dtype) for x in kept]
        for _, loaded in loads:
            loaded()
        master, *state = fetched = [x for x, _ in loads]
        on_device = replace(group, master=master, state=dict(zip(group.state, state, strict=True)))
        ElementUpdates(replace(self._on_device, shards=[on_device])).apply(0, lr, step, clipping)
        on_device.copy_to_params()
        written = [(x, self._buffers.read(x, host)) for x, host in zip(fetched, kept, strict=True)]

        def finish() -> None:
            for _, wait in written:
                wait()

        return finish

    def _begin_on_host(self, group: OptimizerShard, lr: float, step: int, clipping: Clipping) -> Wait:
        """Start to copy a sub-group's gradient; the returned function updates the sub-group on the host."""
        memory = self._free.popleft()
        grad = memory[: group.grad.numel()]
        wait = self._buffers.read(group.grad, grad)

        def finish() -> None:
            wait()
            read = replace(clipping, grad_factor=self._clipping[0], skip=self._clipping[1].float())
            on_host = replace(group, grad=grad)
            ElementUpdates(replace(self._on_host, shards=[on_host])).apply(0, lr, step, read)
            self._free.append(memory)
            master, loaded = self._buffers.load(group.master, group.master.shape, group.master.dtype)
            loaded()
            replace(group, master=master).copy_to_params()

        return finish
