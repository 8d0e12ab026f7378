"""The device and what it can do: the one file that names CUDA. Everything else takes a `Device` as an argument."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch


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

    def synchronize(self) -> None:
        """Wait until everything issued is done."""
        if not self.is_cpu:
            torch.cuda.synchronize(self.torch)

    def peak_memory(self) -> int:
        """Most bytes in use so far: allocated on a GPU, resident in this process on a CPU."""
        if not self.is_cpu:
            return torch.cuda.max_memory_allocated(self.torch)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpus() -> int:
    """GPUs of this host that torch can use."""
    return torch.cuda.device_count()


def detect(local_rank: int = 0, allow_gpu: bool = True) -> Device:
    """The GPU of this local rank where there is one, else the CPU with one thread for each local process' share.

    Raises: RuntimeError if there are GPUs, but fewer than local ranks.
    """
    if not (allow_gpu and torch.cuda.is_available()):
        torch.set_num_threads(_threads())
        return Device(torch.device("cpu"), "gloo")
    if local_rank >= gpus():
        raise RuntimeError(f"local rank {local_rank} has no GPU: this host has {gpus()}")
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
