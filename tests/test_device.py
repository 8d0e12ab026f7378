"""The device of a process: its choice, threads and properties."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megascale import device
from megascale.core.errors import ConfigError
from megascale.device import Device, DeviceError, PinnedBuffers, StreamTimer, detect_device

PACKAGE = Path(device.__file__).parent


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host with two GPUs. The list has the GPUs that were made current."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_a_gpu_says_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {1: (9, 0)}[device.index])
    assert Device(torch.device("cuda", 1), "nccl").capability == (9, 0)
    assert detect_device(allow_gpu=False).capability == (0, 0)


def test_a_gpu_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is in the format of torch.numa.binding; None with a torch that does not report it."""
    where = {"pci_domain_id": 1, "pci_bus_id": 0xDC, "pci_device_id": 2}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**where))
    assert Device(torch.device("cuda", 1), "nccl").pci_address == "0001:dc:02.0"
    where.clear()
    assert Device(torch.device("cuda", 1), "nccl").pci_address is None
    assert Device(torch.device("cpu"), "gloo").pci_address is None


def test_gemms_leave_multiprocessors_of_a_gpu_until_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = ["its own"]

    def prefer(library: str | None = None) -> str:
        libraries.append(library or libraries[-1])
        return libraries[-1]

    def taken() -> tuple[object, str]:
        return torch._C._get_sm_carveout_experimental(), libraries[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    gpu, cpu = Device(torch.device("cuda", 0), "nccl"), Device(torch.device("cpu"), "gloo")
    for undo in (gpu.leave_sms(0), cpu.leave_sms(4)):
        assert libraries == ["its own"]
        undo()
    undo = gpu.leave_sms(4)
    try:
        assert taken() == (4, "cublaslt")
    finally:
        undo()
    assert taken() == (None, "its own")


def threads(monkeypatch: pytest.MonkeyPatch, cores: int, **env: str) -> int:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    detect_device(allow_gpu=False)
    return given[0]


def test_cores_are_shared_among_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads(monkeypatch, 8) == 8
    assert threads(monkeypatch, 8, LOCAL_WORLD_SIZE="3") == 2
    assert threads(monkeypatch, 2, LOCAL_WORLD_SIZE="8") == 1


def test_omp_num_threads_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads(monkeypatch, 8, LOCAL_WORLD_SIZE="8", OMP_NUM_THREADS="4") == 4
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS: 0 is not a number from 1"):
        threads(monkeypatch, 8, OMP_NUM_THREADS="0")


def test_a_rank_has_the_gpu_of_its_local_number(gpus: list[int]) -> None:
    assert detect_device(1) == Device(torch.device("cuda", 1), "nccl")
    assert gpus == [1]


def test_a_rank_without_a_gpu_of_its_own_is_refused(gpus: list[int]) -> None:
    with pytest.raises(DeviceError, match="local rank 2 has no GPU: this host has 2"):
        detect_device(2)
    assert gpus == []


def test_two_ranks_share_a_gpu_where_nccl_allows_it(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert [detect_device(rank).torch_device.index for rank in range(4)] == gpus == [0, 1, 0, 1]
    with pytest.raises(DeviceError, match="local rank 4 has no GPU: this host has 2"):
        detect_device(4)


def test_gpus_are_used_only_where_allowed(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert detect_device(0, allow_gpu=False) == Device(torch.device("cpu"), "gloo")
    assert gpus == []


def test_a_cpu_says_its_name_and_peak_memory() -> None:
    cpu = Device(torch.device("cpu"), "gloo")
    assert cpu.is_cpu and cpu.name
    cpu.synchronize()
    before = cpu.peak_memory()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    status = Path("/proc/self/status").read_text()
    high = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    assert before <= cpu.peak_memory()
    assert cpu.peak_memory() == pytest.approx(high, rel=0.05)
    assert cpu.peak_memory() > block.nbytes


class Event:
    """An event of a device that has done all its work, and takes a second from one record to the next."""

    made = records = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        Event.records += 1
        self.second = Event.records

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.second - self.second)


def test_an_event_is_used_again_once_nothing_refers_to_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StreamTimer(torch.device("cpu"))
    kept = timer.mark()
    begin = timer.seconds(kept)
    assert begin is not None
    for number in range(1, 41):  # the base of times moves along
        assert timer.seconds(timer.mark()) == pytest.approx(begin + number)
        assert timer.seconds(kept) == pytest.approx(begin)
    assert Event.made == 3, "the base of times, the mark that is kept, and the others in turn"


def test_host_memory_is_pinned_as_long_as_it_is_viewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    pinned = list[int]()

    def pin(memory: torch.Tensor) -> Callable[[], None]:
        pinned.append(memory.data_ptr())
        return pinned.clear

    view = PinnedBuffers(torch.device("cpu"), pin).allocate(4096).view(torch.float32)[8:]
    view.fill_(1.0)
    assert pinned == [view.data_ptr() - 32]
    del view
    assert not pinned


def test_cuda_is_named_in_this_file_alone() -> None:
    naming = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"torch\.cuda|[\"']cuda[\"':]", path.read_text())
    }
    assert naming == {"device.py"}
