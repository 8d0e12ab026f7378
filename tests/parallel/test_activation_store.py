"""Offload of block inputs changes no run, and is ordered with compute: a buffer is poisoned as soon as it is free."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.device import Device, PlainBuffers, Wait
from megascale.parallel.activation_media import HostMemory
from megascale.parallel.activation_store import ActivationStore
from megascale.plan.account.memory import JobMemory
from tests.memory import held_bytes
from tests.parallel.test_tp_overlap import Outcome, outcome
from tests.runs import GEMMA2, GPT, LLAMA, builds, config_of, settings
from tests.worlds import run_world

ORDERINGS = ("save after compute", "compute after save", "load after compute", "compute after load")
SIZE = 3  # elements of a block's input


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

    def load(self, host: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Wait]:
        x, target = self.device.empty()
        source = host.view(torch.float32).numpy()
        return x, self._copy("load", lambda: np.copyto(target, source))

    def _copy(self, queue: str, operation: Callable[[], object]) -> Wait:
        missing = self.device.missing
        place = self.device.issue(queue, operation, [] if missing == f"{queue} after compute" else self.device.issued())
        return lambda: None if missing == f"compute after {queue}" else self.device.wait(place)


Reads = list[tuple[int, np.ndarray]]


def forward(
    device: SimulatedDevice, offload: ActivationStore, values: list[int], reads: Reads
) -> list[Callable[[], None]]:
    """Issue the forward of blocks with inputs of these values; return their backwards."""
    backwards = []
    for value in values:
        x, memory = device.empty()
        device.compute(lambda memory=memory, value=value: memory.fill(value))
        stored = offload.store(x)
        device.compute(lambda memory=memory, value=value: reads.append((value, memory.copy())))

        def backward(stored: Callable[[], Tensor] = stored, value: int = value) -> None:
            taken = stored()
            memory = device.memory(taken)
            device.compute(lambda: reads.append((value, memory.copy())))

        backwards.append(backward)
    return backwards


class Block(torch.autograd.Function):
    """A block on a simulated device that saves two tensors, of which it reads one in forward and both in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: SimulatedDevice, value: int, reads: Reads) -> Tensor:
        saved = list[Tensor]()
        for number in (value, value + 1):
            tensor, memory = device.empty()
            device.compute(lambda memory=memory, number=number: memory.fill(number))
            saved.append(tensor)
        device.compute(lambda memory=memory, number=number: reads.append((number, memory.copy())))
        ctx.save_for_backward(*saved)
        ctx.device, ctx.value, ctx.reads = device, value, reads
        return x + 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for number, tensor in enumerate(ctx.saved_tensors, ctx.value):
            memory = ctx.device.memory(tensor)
            ctx.device.compute(lambda memory=memory, number=number: ctx.reads.append((number, memory.copy())))
        return grads[0], None, None, None


def forward_moving(
    device: SimulatedDevice, offload: ActivationStore, values: list[int], reads: Reads
) -> list[Callable[[], None]]:
    """Issue the forward of blocks that move what they save; return one backward, of all."""
    x = torch.zeros(SIZE, requires_grad=True)
    for value in values:
        with offload.moving("host", x, []):
            x = Block.apply(x, device, value, reads)
    root = x.sum()
    return [root.backward]


def wrong_reads(missing: str, seed: int, issue: Callable[..., list[Callable[[], None]]] = forward) -> int:
    """Simulate three micro-batches of four blocks in 1F1B; count the inputs that blocks did not see as they were."""
    device, reads = SimulatedDevice(missing), Reads()
    offload = ActivationStore({"host": HostMemory(SimulatedBuffers(device))})
    running: list[tuple[Any, list[Callable[[], None]]]] = []
    for action in "FFBFBB":
        if action == "F":
            first = 10 * len(device.queues["save"])
            backwards = issue(device, offload, list(range(first, first + 8, 2)), reads)
            running.append((offload.end_forward(), backwards))
        else:
            last, backwards = running.pop(0)
            last.fetch()
            for backward in reversed(backwards):
                backward()
    device.run(seed)
    assert len(reads) == (2 if issue is forward else 3) * 12
    return sum(bool((memory != value).any()) for value, memory in reads)


def test_blocks_see_their_inputs_in_every_order_of_the_device() -> None:
    assert not any(wrong_reads("", seed, issue) for seed in range(200) for issue in (forward, forward_moving))


@pytest.mark.parametrize("missing", ORDERINGS)
@pytest.mark.parametrize("issue", [forward, forward_moving])
def test_without_an_ordering_a_poisoned_buffer_is_seen(missing: str, issue: Any) -> None:
    assert any(wrong_reads(missing, seed, issue) for seed in range(200))


class LateBuffers(PlainBuffers):
    """Host memory whose copies happen at the wait, and not before; `allocated` is its number of bytes."""

    allocated = 0

    def allocate(self, nbytes: int) -> Tensor:
        self.allocated += nbytes
        return super().allocate(nbytes)

    def save(self, x: Tensor, host: Tensor) -> Wait:
        return lambda: PlainBuffers.save(self, x, host)()

    def load(self, host: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Wait]:
        x = torch.empty(shape, dtype=dtype)
        x.view(-1).view(torch.uint8).fill_(255)  # NaN of every float

        def wait() -> None:
            x.copy_(PlainBuffers.load(self, host, shape, dtype)[0])

        return x, wait


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "pp2 gpipe": {"parallel__pp": 2, "parallel__schedule": "gpipe"},
    "pp2 vpp2 dp2 zero2": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2},
    "pp2 vpp2, one chunk": {"parallel__pp": 2, "parallel__vpp": 2, "train__recompute_model_chunks": [1]},
    "cp2 ring pp2": {"parallel__cp": 2, "parallel__pp": 2, "model__dropout": 0.0},
    "chunks pp2": {
        "data__sequence_chunk_tokens": 4, "data__sequence_chunks_saved": 2, "parallel__pp": 2, "model__dropout": 0.0,
    },
    "hybrid pp2": {
        "parallel__hybrid_dp": True, "parallel__dp": 2, "parallel__pp": 2, "data__max_tokens_per_rank": 8,
        "data__attention_mask": "document", "data__document_length": 5, "model__dropout": 0.0,
    },
    "hybrid pp2, more micro-batches than tokens ask for": {
        "parallel__hybrid_dp": True, "parallel__dp": 2, "parallel__pp": 2, "data__max_tokens_per_rank": 16,
        "data__attention_mask": "document", "data__document_length": 8, "model__dropout": 0.0, "batch__global": 2,
    },
}  # fmt: skip
CASES: list[dict[str, Any]] = [
    {"model": GPT, "train__precision": "fp32"},
    {"model": LLAMA, "train__precision": "bf16", "train__mlp_tiles": 3},
    {"model": GEMMA2, "train__precision": "fp64"},
    {"model": LLAMA, "model__block": "parallel", "train__precision": "fp32"},
]


def trained(rank: Rank, configs: list[RunConfig]) -> list[Outcome]:
    """Train every configuration; the copies of offloaded inputs happen as late as they may. Their memory is allocated
    before the first step, and has the bytes of the formula.
    """
    results, made = [], list[LateBuffers]()

    def late_buffers(device: Device) -> LateBuffers:
        made.append(LateBuffers())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "host_buffers", late_buffers)
        for run in builds(rank, configs):
            offload = run.pipeline.store
            before = made[-1].allocated if offload is not None else 0
            results.append(outcome(run, 2))
            if offload is not None:
                assert made[-1].allocated == before == JobMemory(run.config).moved_bytes(run.mesh.coord.pp, "host")
                assert (
                    run.config.parallel.hybrid_dp
                    or sum(piece.nbytes for piece in offload.media["host"].pool.free) == before
                )
    return results


def check_layout(cases: list[dict[str, Any]], layout: str, folder: Path) -> None:
    configs = []
    for case in cases:
        for offload in (False, True):
            keys: dict[str, Any] = {"train__recompute": "full", "train__activation_offload": offload}
            keys["model__dropout"] = 0.1
            keys |= {name: value for name, value in case.items() if name != "model"} | LAYOUTS[layout]
            configs.append(config_of(settings(case["model"], folder, **keys), folder))
    for outcomes in run_world(configs[0].world_size, trained, configs):
        for case, kept, offloaded in zip(cases, outcomes[::2], outcomes[1::2], strict=True):
            assert offloaded[0] == kept[0], case
            assert np.array_equal(offloaded[1], kept[1]), case


def test_offload_is_bit_equal(tmp_path: Path) -> None:
    check_layout(CASES[:2], "pp2 vpp2, one chunk", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_offload_is_bit_equal_in_every_layout(layout: str, tmp_path: Path) -> None:
    check_layout(CASES, layout, tmp_path)


class OtherBuffers(PlainBuffers):
    """Host memory that torch has not allocated, as that of a GPU's host is not the device's."""

    def allocate(self, nbytes: int) -> Tensor:
        return torch.from_numpy(np.empty(nbytes, np.uint8))


def held(rank: Rank, configs: list[RunConfig]) -> list[tuple[int, int, bool]]:
    """Bytes after the forward of a micro-batch, bytes in host memory, and whether an evaluation stores inputs."""
    results = []
    for run in builds(rank, configs):
        (stage,), micro_batch, offload = run.stages, run.train_loader.batch(0).micro_batches[0], run.pipeline.store
        if offload is not None:
            offload.media = {"host": HostMemory(OtherBuffers())}
        stage(None, micro_batch)  # fills caches
        size = held_bytes(lambda stage=stage, micro_batch=micro_batch: stage(None, micro_batch))
        host = 0 if offload is None else offload.media["host"].pool.nbytes
        last = offload and offload.end_forward()
        with torch.no_grad():
            stage(None, micro_batch)
        stores = offload is not None and offload.end_forward() is not None
        assert (last is None) == (offload is None)
        results.append((size, host, stores))
    return results


def test_one_input_of_a_micro_batch_stays_on_the_device(tmp_path: Path) -> None:
    keys = {"train__precision": "fp32", "train__recompute": "full", "model__seq_length": 64}
    trees = [settings(LLAMA, tmp_path, train__activation_offload=offload, **keys) for offload in (False, True)]
    (kept, _, _), (offloaded, host, stores) = run_world(1, held, [config_of(tree, tmp_path) for tree in trees])[0]
    size, layers = 4 * 64 * 32, 4
    assert kept - offloaded == (layers - 1) * size
    assert host == layers * size  # of this forward, in the memory of the one before
    assert not stores


def test_host_buffers_are_reused() -> None:
    """Tensors of other sizes reuse buffers too, once one of the largest size is free."""
    allocated: list[int] = []

    class Counting(PlainBuffers):
        def allocate(self, nbytes: int) -> Tensor:
            allocated.append(nbytes)
            return super().allocate(nbytes)

    offload = ActivationStore({"host": HostMemory(Counting())})
    for sizes in ([4, 8, 2], [8, 1, 8], [3, 8, 8], [2, 2, 2]):
        inputs = [torch.randn(size) for size in sizes]
        stored = [offload.store(x) for x in inputs]
        offload.end_forward()
        for x, take in zip(reversed(inputs), reversed(stored), strict=True):
            assert torch.equal(take(), x)
    assert len(allocated) <= 5 and max(allocated) == 32
