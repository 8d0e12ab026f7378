"""What a store moves is ordered with compute: a buffer is poisoned as soon as it is free."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.device import PlainBuffers, Wait
from megascale.parallel.activation_media import HostMemory
from megascale.parallel.activation_store import ActivationStore

ORDERINGS = ("save after compute", "compute after save", "load after compute", "compute after load")
SIZE = 3  # elements of a tensor


class SimulatedDevice:
    """A simulated device: queues of operations that each run in their order, and otherwise in any order that the waits
    between them permit. The memory of a tensor is poisoned with NaN, by a compute operation, when the tensor is freed.
    """

    def __init__(self, missing: str) -> None:
        self.missing = missing
        self.queues: dict[str, list[tuple[Callable[[], object], list[int]]]] = {"compute": [], "save": [], "load": []}
        self._waits: list[tuple[str, int]] = []  # of the next compute operation
        self._slots: dict[int, np.ndarray] = {}
        self._free: list[np.ndarray] = []

    def issue(self, queue: str, operation: Callable[[], object], after: list[tuple[str, int]]) -> tuple[str, int]:
        """Add an operation to a queue, and return its place there."""
        self.queues[queue].append((operation, after))
        return queue, len(self.queues[queue])

    def compute(self, operation: Callable[[], object]) -> None:
        self.issue("compute", operation, self._waits)
        self._waits = []

    def issued(self) -> list[tuple[str, int]]:
        return [("compute", len(self.queues["compute"]))]

    def wait(self, place: tuple[str, int]) -> None:
        """Make the next compute operation wait."""
        self._waits = [*self._waits, place]

    def empty(self) -> tuple[Tensor, np.ndarray]:
        """Allocate a tensor; returned beside it is its memory, which outlives it."""
        memory = self._free.pop(0) if self._free else np.full(SIZE, np.nan, np.float32)
        window = memory[:]
        weakref.finalize(window, self._freed, memory)
        tensor = torch.from_numpy(window)
        self._slots[tensor.data_ptr()] = memory
        return tensor, memory

    def memory(self, tensor: Tensor) -> np.ndarray:
        return self._slots[tensor.data_ptr()]

    def _freed(self, memory: np.ndarray) -> None:
        self.compute(lambda: memory.fill(np.nan))
        self._free.append(memory)

    def run(self, seed: int) -> None:
        """Run all operations in a random order of those permitted."""
        choose, done = random.Random(seed), dict.fromkeys(self.queues, 0)
        while any(done[name] < len(queue) for name, queue in self.queues.items()):
            ready = [
                name
                for name, queue in self.queues.items()
                if done[name] < len(queue) and all(done[other] >= place for other, place in queue[done[name]][1])
            ]
            name = choose.choice(ready)
            self.queues[name][done[name]][0]()
            done[name] += 1


class SimulatedBuffers:
    """Host memory of a simulated device, without the ordering `device.missing`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device

    def allocate(self, nbytes: int) -> Tensor:
        return torch.full((nbytes // 4,), torch.nan).view(torch.uint8)

    def save(self, x: Tensor, host: Tensor) -> Wait:
        source, target = self.device.memory(x), host.view(torch.float32).numpy()
        return self._copy("save", lambda: np.copyto(target, source))

    def load(self, host: Tensor) -> tuple[Tensor, Wait]:
        x, target = self.device.empty()
        source = host.view(torch.float32).numpy()
        return x, self._copy("load", lambda: np.copyto(target, source))

    def _copy(self, queue: str, operation: Callable[[], object]) -> Wait:
        missing = self.device.missing
        place = self.device.issue(queue, operation, [] if missing == f"{queue} after compute" else self.device.issued())
        return lambda: None if missing == f"compute after {queue}" else self.device.wait(place)


Reads = list[tuple[int, np.ndarray]]


class Block(torch.autograd.Function):
    """A block on a simulated device that saves tensors, of which it reads the last in forward, and all in backward;
    every second block reads none in backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: SimulatedDevice, values: range, reads: Reads) -> Tensor:
        saved = list[Tensor]()
        for value in values:
            tensor, memory = device.empty()
            device.compute(lambda memory=memory, value=value: memory.fill(value))
            saved.append(tensor)
        device.compute(lambda: reads.append((value, memory.copy())))
        ctx.save_for_backward(*saved)
        ctx.device, ctx.values, ctx.reads = device, values, reads
        return x + 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for value, tensor in zip(ctx.values, ctx.saved_tensors, strict=True) if ctx.values[0] % 4 else ():
            memory = ctx.device.memory(tensor)
            ctx.device.compute(lambda memory=memory, value=value: ctx.reads.append((value, memory.copy())))
        return grads[0], None, None, None


def wrong_reads(missing: str, seed: int, count: int) -> int:
    """Simulate three micro-batches of four blocks in 1F1B, each of which saves `count` tensors; count the tensors that
    blocks did not see as they were.
    """
    device, reads = SimulatedDevice(missing), Reads()
    store = ActivationStore({"host": HostMemory(SimulatedBuffers(device))})
    running: list[tuple[Any, Tensor]] = []
    for action in "FFBFBB":
        if action == "F":
            x, first = torch.zeros(SIZE, requires_grad=True), 10 * len(device.queues["save"])
            for value in range(first, first + 8, 2):
                with store.moving("host", x, []):
                    x = Block.apply(x, device, range(value, value + count), reads)
            running.append((store.end_forward(), x.sum()))
        else:
            last, root = running.pop(0)
            last.fetch()
            root.backward()
    device.run(seed)
    assert len(reads) == (2 + count) * 6
    return sum(bool((memory != value).any()) for value, memory in reads)


def test_blocks_see_their_tensors_in_every_order_of_the_device() -> None:
    assert not any(wrong_reads("", seed, count) for seed in range(200) for count in (1, 2))


@pytest.mark.parametrize("missing", ORDERINGS)
@pytest.mark.parametrize("count", [1, 2])
def test_without_an_ordering_a_poisoned_buffer_is_seen(missing: str, count: int) -> None:
    assert any(wrong_reads(missing, seed, count) for seed in range(200))


class LateBuffers(PlainBuffers):
    """Host memory whose copies happen at the wait, and not before; `allocated` is its number of bytes."""

    allocated = 0

    def allocate(self, nbytes: int) -> Tensor:
        self.allocated += nbytes
        return super().allocate(nbytes)

    def save(self, x: Tensor, host: Tensor) -> Wait:
        return lambda: PlainBuffers.save(self, x, host)()

    def load(self, host: Tensor) -> tuple[Tensor, Wait]:
        x = torch.empty_like(host)
        x.view(-1).view(torch.uint8).fill_(255)  # NaN of every float

        def wait() -> None:
            x.copy_(host)

        return x, wait


class OtherBuffers(PlainBuffers):
    """Host memory that torch has not allocated, as that of a GPU's host is not the device's."""

    def allocate(self, nbytes: int) -> Tensor:
        return torch.from_numpy(np.empty(nbytes, np.uint8))
