"""The compute device and its capabilities. Other code takes a `Device`; only kernels name CUDA, too."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, dtype
from torch.nn.attention import SDPBackend

from megascale.core.env_numbers import openmp_threads
from megascale.core.errors import Exit, MegascaleError
from megascale.core.limits import memory_limits
from megascale.core.process import usable_cores
from megascale.core.rank import local_world_size
from megascale.record.recorder import HostTimer, Timer


class StreamMark:
    """An event in the current stream of a GPU, from a `pool` to which it returns once nothing refers to the mark: CUDA
    creates and destroys an event in microseconds, and a communication has up to four.
    """

    __slots__ = ("_pool", "event")

    def __init__(self, pool: list[torch.cuda.Event]) -> None:
        self._pool = pool
        self.event = pool.pop() if pool else torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __del__(self) -> None:
        self._pool.append(self.event)


Mark = float | StreamMark
"""A moment in a device's work: seconds on a CPU, an event in a stream on a GPU."""


class DeviceError(MegascaleError):
    """A process without a device: more processes than GPUs on the host."""

    exit_status = Exit.CONFIG


_NULL_CONTEXT = contextlib.nullcontext()


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Name the work of a `with` block in torch's profiler, if the profiler runs."""
    running = torch.autograd.profiler._is_profiler_enabled
    return torch.autograd.profiler.record_function(name) if running else _NULL_CONTEXT


class StreamTimer:
    """The timer of a GPU, by events in its streams. Times count from a base event that the host waited for at the
    start. The base moves along, because the difference of two events has only seven digits.
    """

    synchronous = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watching: dict[Hashable, torch.cuda.Stream] = {}
        self._pool: list[torch.cuda.Event] = []
        self._base = StreamMark(self._pool)
        self._base.event.synchronize()
        self._base_seconds = time.perf_counter()

    def mark(self) -> Mark:
        return StreamMark(self._pool)

    def completion_mark(self, works: Sequence[dist.Work], channel: Hashable) -> Mark:
        """Return a mark at the end of `works`. Works of a `channel` complete in order."""
        if channel not in self._watching:  # NCCL takes normal-priority streams, so high priority avoids a shared stream
            self._watching[channel] = torch.cuda.Stream(self._device, priority=-1)
        with torch.cuda.stream(self._watching[channel]):
            for work in works:
                work.wait()  # blocks this stream, not the host
            return self.mark()

    def seconds(self, mark: Mark) -> float | None:
        assert isinstance(mark, StreamMark)
        if not mark.event.query():
            return None
        seconds = self._base_seconds + self._base.event.elapsed_time(mark.event) / 1e3
        if seconds > self._base_seconds + 10:
            self._base, self._base_seconds = mark, seconds
        return seconds


Wait = Callable[[], None]
"""Makes work that is issued to the device later wait for something, without waiting itself."""


class HostBuffers(Protocol):
    """Copies of tensors in host memory. A copy begins after the work that was issued to the device before it."""

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate a flat buffer of bytes."""

    def save(self, x: Tensor, host: Tensor) -> Wait:
        """Start to copy x to a tensor like it in a buffer. Until the returned wait, neither may be written or freed."""

    def read(self, x: Tensor, host: Tensor) -> Wait:
        """Save x for the host, which waits itself in the returned wait."""

    def load(self, host: Tensor) -> tuple[Tensor, Wait]:
        """Start to copy a saved tensor to the device. Until the returned wait, it may not be read, nor host written."""


class PlainBuffers:
    """The memory of a CPU, or in a dry run of torch's device `meta`, whose work is done when a call returns."""

    def __init__(self, memory: str = "cpu", device: torch.device | None = None) -> None:
        self._memory, self._device = memory, device

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._memory)

    def save(self, x: Tensor, host: Tensor) -> Wait:
        host.copy_(x)
        return _nothing

    def read(self, x: Tensor, host: Tensor) -> Wait:
        return self.save(x, host)

    def load(self, host: Tensor) -> tuple[Tensor, Wait]:
        return torch.empty_like(host, device=self._device).copy_(host), _nothing


class PinnedBuffers:
    """Host memory of a GPU that `pin` pins, in exact sizes: torch's are powers of two. Streams for both directions."""

    def __init__(self, device: torch.device, pin: Callable[[Tensor], Callable[[], None]]) -> None:
        self._device, self._pin = device, pin
        self._save, self._load = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def allocate(self, nbytes: int) -> Tensor:
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)  # whole pages, shared with nothing
        pinned = weakref.finalize(memory.untyped_storage(), self._pin(memory))  # until nothing views it
        pinned.atexit = False  # then CUDA may be gone
        return memory

    def save(self, x: Tensor, host: Tensor) -> Wait:
        return self._wait_for(self._copy(self._save, host, x))

    def read(self, x: Tensor, host: Tensor) -> Wait:
        return self._copy(self._save, host, x).synchronize

    def load(self, host: Tensor) -> tuple[Tensor, Wait]:
        x = torch.empty_like(host, device=self._device)
        return x, self._wait_for(self._copy(self._load, x, host))

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Start a copy in a stream unknown to the allocator: the caller waits before either tensor is freed."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def _wait_for(self, copied: torch.cuda.Event) -> Wait:
        return lambda: torch.cuda.current_stream(self._device).wait_event(copied)


def _nothing() -> None:
    """Do nothing: there is nothing to wait for, or to undo."""


@dataclass(frozen=True)
class Device:
    """The device of this process. `backend`: torch.distributed's backend for the device."""

    torch_device: torch.device
    backend: str

    @property
    def is_cpu(self) -> bool:
        return self.torch_device.type == "cpu"

    @property
    def name(self) -> str:
        """Model of the GPU, such as 'NVIDIA H100 80GB HBM3', or of the processor."""
        return _processor() if self.is_cpu else torch.cuda.get_device_name(self.torch_device)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of a GPU, such as (9, 0) for Hopper; (0, 0) for a CPU."""
        return compute_capability(self.torch_device)

    @property
    def pci_address(self) -> str | None:
        """PCI address of a GPU, as in /sys/bus/pci/devices; None for a CPU, or if torch does not report an address."""
        if self.is_cpu:
            return None
        gpu: Any = torch.cuda.get_device_properties(self.torch_device)
        if not hasattr(gpu, "pci_bus_id"):
            return None
        return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"

    def attention_kernel(self, compute_dtype: dtype, head_dim: int, enable_gqa: bool) -> str:
        """Return the kernel of torch's scaled_dot_product_attention for causal attention with gradients, such as
        'CUDNN_ATTENTION'. The answer comes from torch, because the rule varies by version. `enable_gqa`: query heads
        share key-value heads.
        """
        tokens, queries = 128, 2 if enable_gqa else 1
        heads = torch.empty(
            tokens, 1, queries + 2, head_dim, dtype=compute_dtype, device=self.torch_device, requires_grad=True
        )
        q, k, v = heads.permute(1, 2, 0, 3).split([queries, 1, 1], 1)
        return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=enable_gqa)).name

    def leave_sms(self, count: int) -> Callable[[], None]:
        """Have this process's GEMMs leave `count` multiprocessors of a GPU to other kernels. A GEMM spreads its tiles
        over all, and those for one that a message occupies run in a second wave. The returned function undoes it.
        """
        if not count or self.is_cpu:
            return _nothing
        library = torch.backends.cuda.preferred_blas_library()
        torch._C._set_sm_carveout_experimental(count)
        torch.backends.cuda.preferred_blas_library("cublaslt")  # cuBLAS itself takes all

        def undo() -> None:
            torch._C._set_sm_carveout_experimental(None)
            torch.backends.cuda.preferred_blas_library(library)

        return undo

    def timer(self) -> Timer:
        """Return a timer of this device's work."""
        return HostTimer() if self.is_cpu else StreamTimer(self.torch_device)

    def copy_to_host(self, values: Tensor) -> Callable[[], list[float]]:
        """Start copying `values` to the host. The returned function waits for the copy, not for work issued later, and
        returns the values.
        """
        if self.is_cpu:
            return values.tolist
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def host_values() -> list[float]:
            copied.synchronize()
            return copy.tolist()

        return host_values

    def read_counts(self, counts: Tensor, total: int) -> list[int]:
        """Copy counts of rows [n, ...] to the host, which waits for the device. `total`: the sum of each of the n, if
        loads are equal.
        """
        numbers: list[int] = counts.flatten().tolist()
        return numbers

    def host_buffers(self) -> HostBuffers:
        """Return host memory for copies of this device's tensors."""
        return PlainBuffers() if self.is_cpu else PinnedBuffers(self.torch_device, self.pin_memory)

    def synchronize(self) -> None:
        """Wait for all issued work."""
        if not self.is_cpu:
            torch.cuda.synchronize(self.torch_device)

    def pin_memory(self, memory: Tensor) -> Callable[[], None]:
        """Pin host memory in place, so that copies from a GPU are asynchronous. The returned function undoes it, which
        must happen before the memory is freed: CUDA refuses to map addresses that it still counts as pinned.
        """
        if self.is_cpu:
            return _nothing
        portable, address, runtime = 1, memory.data_ptr(), torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, portable))
        return lambda: torch.cuda.check_error(runtime.cudaHostUnregister(address))

    def host_threads(self) -> int:
        """Return the number of threads that may compute on the host: torch's on a CPU; beside a GPU this rank's
        share of the cores, since torchrun sets OMP_NUM_THREADS to 1.
        """
        return torch.get_num_threads() if self.is_cpu else max(1, usable_cores() // local_world_size(default=1))

    def total_memory(self) -> int:
        """Return the memory of the GPU, or of the host, in bytes."""
        if not self.is_cpu:
            return torch.cuda.get_device_properties(self.torch_device).total_memory
        return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limits()[0])

    def free_memory(self) -> int:
        """Return the bytes that this process can still allocate."""
        if not self.is_cpu:
            return torch.cuda.mem_get_info(self.torch_device)[0]
        with open("/proc/meminfo", encoding="ascii") as file:
            kibibytes = {key: int(rest.split()[0]) for key, rest in (line.split(":") for line in file)}
        return min(kibibytes["MemAvailable"] * 1024, memory_limits()[1])

    def release_memory(self) -> None:
        """Return unused GPU memory to the driver and reset `peak_memory`; do nothing on a CPU."""
        if not self.is_cpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_memory(self) -> int:
        """Return the peak bytes in use: allocated on a GPU, resident in this process on a CPU."""
        if not self.is_cpu:
            return torch.cuda.max_memory_allocated(self.torch_device)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return True if an error says that the device's memory is full. On a CPU torch raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def gpu_count() -> int:
    """Return the number of GPUs of this host that torch can use."""
    return torch.cuda.device_count()


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability, such as (9, 0) for Hopper; (0, 0) of other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def ranks_per_gpu() -> int:
    """Return how many local ranks may share a GPU: 2 with NCCL's NCCL_MULTI_RANK_GPU_ENABLE=1 (2.30, experimental),
    which is for tests of communication on one GPU; else 1.
    """
    return 2 if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else 1


def no_gpu_reason() -> str | None:
    """Return in a line why torch has no GPU to use; None if torch has a GPU."""
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # AssertionError: torch built without CUDA
        return f"torch finds no GPU: {str(error).splitlines()[0]} (torch {torch.__version__})"
    return f"torch finds no GPU (torch {torch.__version__})"


def gpu_stack_versions() -> dict[str, str]:
    """Return the versions of CUDA, cuDNN and NCCL, or of ROCm; empty if torch was built without GPU support."""
    if torch.version.hip:
        return {"ROCm": torch.version.hip}
    if not torch.version.cuda:
        return {}
    versions = {"CUDA": torch.version.cuda}
    if torch.cuda.is_available():
        versions["cuDNN"] = str(torch.backends.cudnn.version())
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def copy_to_device(values: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """Copy what is in host memory to the device; on a CPU the result shares its memory."""
    tensor = torch.as_tensor(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # pageable memory would block the host


def detect_device(local_rank: int = 0, allow_gpu: bool = True) -> Device:
    """Return the GPU of this local rank; on a host without GPUs the CPU, with its cores divided among local ranks.

    Raises: DeviceError if the host has GPUs, but too few for its local ranks.
    """
    if not (allow_gpu and torch.cuda.is_available()):
        torch.set_num_threads(openmp_threads() or max(1, usable_cores() // local_world_size(default=1)))
        return Device(torch.device("cpu"), "gloo")
    if local_rank >= gpu_count() * ranks_per_gpu():
        raise DeviceError(
            f"local rank {local_rank} has no GPU: this host has {gpu_count()}",
            hint="start one process per GPU, or show all GPUs in CUDA_VISIBLE_DEVICES",
        )
    index = local_rank % gpu_count()
    torch.cuda.set_device(index)
    return Device(torch.device("cuda", index), "nccl")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()
