"""The device and what it can do: the one file that names CUDA. Everything else takes a `Device` as an argument."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, dtype
from torch.nn.attention import SDPBackend

from megascale.core.errors import Exit, MegascaleError

Mark = float | torch.cuda.Event
"""A moment in a device's work. On a CPU it is a time already; a GPU gets there later."""


class DeviceError(MegascaleError):
    """A process that was started on a host without a device for it."""

    exit_status = Exit.CONFIG


class Timer(Protocol):
    """Marks moments without waiting for them. Times are seconds of this process's monotonic clock.

    `host`: whether the thread that issues work is the one that computes, so that its waits are compute's waits.
    """

    host: bool

    def mark(self) -> Mark: ...

    def seconds(self, mark: Mark) -> float | None:
        """When a mark was passed, None if it was not yet."""


class HostTimer:
    """The clock of a device whose work is done when the call returns."""

    host = True

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, mark: Mark) -> float | None:
        assert isinstance(mark, float)
        return mark


class StreamTimer:
    """Events in the streams of a GPU. Their times count from one that the host has waited for, once, at the start;
    from then on the base follows them, for the difference of two events has seven digits.
    """

    host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watching: dict[Hashable, torch.cuda.Stream] = {}
        self._base = self._event()
        self._base.record()
        self._base.synchronize()
        self._base_seconds = time.perf_counter()

    def mark(self) -> Mark:
        event = self._event()
        event.record()
        return event

    def completion(self, works: Sequence[dist.Work], order: Hashable) -> Mark:
        """A mark that is passed when `works` are done. Works of one `order` are done one after the other."""
        if order not in self._watching:  # of the pool that NCCL does not take its streams from: they come round again
            self._watching[order] = torch.cuda.Stream(self._device, priority=-1)
        with torch.cuda.stream(self._watching[order]):
            for work in works:
                work.wait()  # of this stream, not of the host
            return self.mark()

    def seconds(self, mark: Mark) -> float | None:
        assert isinstance(mark, torch.cuda.Event)
        if not mark.query():
            return None
        seconds = self._base_seconds + self._base.elapsed_time(mark) / 1e3
        if seconds > self._base_seconds + 10:
            self._base, self._base_seconds = mark, seconds
        return seconds

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)


@dataclass(frozen=True)
class Device:
    """Where this process computes."""

    torch: torch.device
    backend: str  # of torch.distributed

    @property
    def is_cpu(self) -> bool:
        return self.torch.type == "cpu"

    @property
    def name(self) -> str:
        """The device's own name, such as 'NVIDIA H100 80GB HBM3', or the processor's."""
        return _processor() if self.is_cpu else torch.cuda.get_device_name(self.torch)

    @property
    def capability(self) -> tuple[int, int]:
        """The generation of a GPU in CUDA's numbers, such as (9, 0) of Hopper; (0, 0) of a CPU."""
        return (0, 0) if self.is_cpu else torch.cuda.get_device_capability(self.torch)

    @property
    def pci_address(self) -> str | None:
        """Where a GPU is, as in /sys/bus/pci/devices; None for a CPU, and if this torch does not tell."""
        if self.is_cpu:
            return None
        found: Any = torch.cuda.get_device_properties(self.torch)
        if not hasattr(found, "pci_bus_id"):
            return None
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"

    def attention_kernel(self, number_format: dtype, head_dim: int, shared: bool) -> str:
        """The kernel that torch's scaled_dot_product_attention takes here for causal attention that is differentiated,
        such as 'CUDNN_ATTENTION'. Torch is asked, for its rule is another in many of its versions. `shared`: whether
        query heads share key-value heads.
        """
        tokens, queries = 128, 2 if shared else 1
        heads = torch.empty(
            tokens, 1, queries + 2, head_dim, dtype=number_format, device=self.torch, requires_grad=True
        )
        q, k, v = heads.permute(1, 2, 0, 3).split([queries, 1, 1], 1)
        return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=shared)).name

    def timer(self) -> Timer:
        """What marks moments in this device's work."""
        return HostTimer() if self.is_cpu else StreamTimer(self.torch)

    def read(self, values: Tensor) -> Callable[[], list[float]]:
        """Bring numbers to the host. The call returns at once; what it returns waits for them, and for nothing that is
        issued in between.
        """
        if self.is_cpu:
            return values.tolist
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values, non_blocking=True)
        there = torch.cuda.Event()
        there.record()

        def numbers() -> list[float]:
            there.synchronize()
            return copy.tolist()

        return numbers

    def synchronize(self) -> None:
        """Wait until everything issued is done."""
        if not self.is_cpu:
            torch.cuda.synchronize(self.torch)

    def pin(self, memory: Tensor) -> None:
        """Fix host memory where it is, so that copies from a GPU go there at once and by themselves."""
        if not self.is_cpu:
            portable = 1
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable))

    def memory(self) -> int:
        """Bytes that there are: of the GPU, or of the host."""
        if not self.is_cpu:
            return torch.cuda.get_device_properties(self.torch).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def free_memory(self) -> int:
        """Bytes that this process can still take."""
        if not self.is_cpu:
            return torch.cuda.mem_get_info(self.torch)[0]
        with open("/proc/meminfo", encoding="ascii") as file:
            kibibytes = {key: int(rest.split()[0]) for key, rest in (line.split(":") for line in file)}
        return kibibytes["MemAvailable"] * 1024

    def release_memory(self) -> None:
        """Give back what is not in use, and begin `peak_memory` anew; on a CPU neither can be done."""
        if not self.is_cpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch)

    def peak_memory(self) -> int:
        """Most bytes in use so far: allocated on a GPU, resident in this process on a CPU."""
        if not self.is_cpu:
            return torch.cuda.max_memory_allocated(self.torch)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def out_of_memory(error: RuntimeError) -> bool:
    """Whether torch says that a device's memory is full. Of a CPU's it raises no error of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def gpus() -> int:
    """GPUs of this host that torch can use."""
    return torch.cuda.device_count()


def missing_gpu() -> str | None:
    """Why torch has no GPU to use, in one line; None if it has one."""
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # the first of a torch that was built without
        return f"torch finds no GPU: {str(error).splitlines()[0]} (torch {torch.__version__})"
    return f"torch finds no GPU (torch {torch.__version__})"


def versions() -> dict[str, str]:
    """What GPUs are driven with; empty for a torch that was built without."""
    if torch.version.hip:
        return {"ROCm": torch.version.hip}
    if not torch.version.cuda:
        return {}
    found = {"CUDA": torch.version.cuda}
    if torch.cuda.is_available():
        found["cuDNN"] = str(torch.backends.cudnn.version())
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def detect(local_rank: int = 0, allow_gpu: bool = True) -> Device:
    """The GPU of this local rank where there is one, else the CPU with one thread for each local process' share.

    Raises: DeviceError if there are GPUs, but fewer than local ranks.
    """
    if not (allow_gpu and torch.cuda.is_available()):
        torch.set_num_threads(_threads())
        return Device(torch.device("cpu"), "gloo")
    if local_rank >= gpus():
        raise DeviceError(
            f"local rank {local_rank} has no GPU: this host has {gpus()}",
            mend="one process a GPU: fewer processes on this host, or a CUDA_VISIBLE_DEVICES that shows all GPUs",
        )
    torch.cuda.set_device(local_rank)
    return Device(torch.device("cuda", local_rank), "nccl")


def _threads() -> int:
    """Threads of this process: OMP_NUM_THREADS, else the cores divided among the host's ranks."""
    if given := os.environ.get("OMP_NUM_THREADS"):
        return max(1, int(given))
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()
