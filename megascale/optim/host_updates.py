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

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.config.train import OptimizerConfig
from megascale.layout.buckets import inside
from megascale.layout.param_groups import ParamGroup
from megascale.layout.sub_groups import AHEAD, aligned_size, is_on_device
from megascale.ops.optimizer import Segment
from megascale.optim.clipping import Clipping
from megascale.optim.element_updates import build_rule
from megascale.optim.optimizer_shard import GroupedRanges, OptimizerShard, host_tensor
from megascale.optim.updates import HostUpdate, Parts, Rules, Updates


@dataclass(frozen=True)
class SubGroup:
    """Elements [start, stop) of a bucket. `host`: their master weights ("") and state by name, of those `ranges` whose
    group has it, end to end. `on_device`: they are updated there.
    """

    shard: OptimizerShard
    start: int
    stop: int
    host: Mapping[str, Tensor]
    ranges: GroupedRanges
    on_device: bool

    @property
    def grad(self) -> Tensor:
        """Their gradient, on the device."""
        return self._window(self.shard.bucket.grad)

    @property
    def weights(self) -> Tensor:
        """Their weights in the dtype of GEMMs, on the device."""
        return self._window(self.shard.bucket.shard_weights)

    def _window(self, flat: Tensor) -> Tensor:
        first = self.shard.bucket.shard[0]
        return flat[self.start - first : self.stop - first]

    def update(
        self, rules: Rules, config: OptimizerConfig, tensors: Mapping[str, Tensor], grad: Tensor, lr: float, step: int,
        grad_factor: Tensor, skip: Tensor,
    ) -> None:  # fmt: skip
        """Update `tensors`, those of `host` or copies of them, with `rules` for where they are."""
        segments, done = defaultdict[ParamGroup, list[Segment]](list), Counter[str]()
        for group, item in self.ranges:
            state = {name: tensors[name][done[name] : done[name] + item.numel] for name in group.state}
            done.update(dict.fromkeys(group.state, item.numel))
            parameter, (weight, own) = item.slot.parameter, (item.view(x, self.start) for x in (tensors[""], grad))
            segments[group].append(Segment(weight, own, state, parameter.is_matrix, parameter.weight_decay))
        for group, of_group in segments.items():
            build_rule(rules, group, of_group, config).step(lr * group.lr_mult, step, grad_factor, skip)


def sub_groups(shard: OptimizerShard, host: HostUpdate, first: int) -> Iterator[SubGroup]:
    """Cut a shard into sub-groups, of which the first has number `first`."""
    size, (begin, end), used = aligned_size(host.size), shard.bucket.shard, Counter[str]()
    for number, start in enumerate(range(begin, end, size), first):
        stop = min(start + size, end)
        ranges = [(group, part) for group, item in shard.ranges for part in inside([item], start, stop)]
        counts = Counter[str]()
        for group, item in ranges:
            counts.update(dict.fromkeys(group.state, item.numel))
        tensors = {name: shard.state[name][used[name] : used[name] + count] for name, count in counts.items()}
        used += counts
        tensors[""] = shard.master[start - begin : stop - begin]
        yield SubGroup(shard, start, stop, tensors, ranges, is_on_device(number, host.stride))


class HostUpdates(Updates):
    """Rules of elements for all shards, whose state is in host memory. The host waits for the device in every step."""

    def __init__(self, parts: Parts) -> None:
        assert parts.host is not None, "the state is in host memory"
        self._config, self._rules, self._host = parts.config, parts.rules, parts.host
        self._buffers = parts.host.buffers
        self.groups = list[list[SubGroup]]()
        number = 0
        for shard in parts.shards:  # a tied embedding has the same numbers on both of its stages
            first = 0 if shard.bucket.tied else number
            self.groups.append([] if shard.bucket.frozen else list(sub_groups(shard, self._host, first)))
            number += 0 if shard.bucket.tied else len(self.groups[-1])
        on_host = [each for groups in self.groups for each in groups if not each.on_device]
        size = max((each.stop - each.start for each in on_host), default=0)
        self._free = deque(
            host_tensor(self._buffers, size, on_host[0].host[""].dtype) for _ in range(AHEAD if on_host else 0)
        )
        self._clipping = host_tensor(self._buffers, 2, torch.float64)

    @property
    def writes_rounded(self) -> bool:
        return True

    def compute(self, lr: float, step: int, clipping: Clipping) -> None:
        values = torch.stack([clipping.grad_factor, clipping.skip.double()])
        self._buffers.read(values, self._clipping.view(torch.uint8))()

    def apply(self, index: int, lr: float, step: int, clipping: Clipping) -> None:
        """Update a shard. The host returns when all state is in its memory again."""
        read, leaving = deque[Callable[[], None]](), deque[Callable[[], None]]()
        for group in self.groups[index]:
            if group.on_device:
                if len(leaving) == AHEAD:
                    leaving.popleft()()
                leaving.append(self._update_on_device(group, lr, step, clipping))
            else:
                read.append(self._read_gradient(group, lr, step))
                if len(read) == AHEAD:
                    read.popleft()()
        for finish in (*read, *leaving):
            finish()

    def _update_on_device(self, group: SubGroup, lr: float, step: int, clipping: Clipping) -> Callable[[], None]:
        """Issue the update of a sub-group to the device; the returned function waits until it is written back."""
        loaded = {name: self._buffers.load(_bytes(x), x.shape, x.dtype) for name, x in group.host.items()}
        for _, wait in loaded.values():
            wait()
        tensors = {name: x for name, (x, _) in loaded.items()}
        group.update(self._rules, self._config, tensors, group.grad, lr, step, clipping.grad_factor, clipping.skip)
        group.weights.copy_(tensors[""])
        written = [self._buffers.read(tensors[name], _bytes(x)) for name, x in group.host.items()]

        def finish() -> None:
            for wait in written:
                wait()
            tensors.clear()  # no copy reads them any longer

        return finish

    def _read_gradient(self, group: SubGroup, lr: float, step: int) -> Callable[[], None]:
        """Start to copy a sub-group's gradient; the returned function updates the sub-group on the host."""
        memory = self._free.popleft()
        grad = memory[: group.stop - group.start]
        wait = self._buffers.read(group.grad, _bytes(grad))

        def finish() -> None:
            wait()
            factor, skip = self._clipping[0], self._clipping[1].float()
            group.update(self._host.rules, self._config, group.host, grad, lr, step, factor, skip)
            self._free.append(memory)
            master, loaded = self._buffers.load(_bytes(group.host[""]), grad.shape, grad.dtype)
            loaded()
            group.weights.copy_(master)

        return finish


def _bytes(x: Tensor) -> Tensor:
    """View host memory as bytes."""
    return x.view(torch.uint8)
