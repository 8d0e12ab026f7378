"""Construction of the store of what blocks save for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megascale.config.run import RunConfig
from megascale.config.train import may_have
from megascale.device import Device

if TYPE_CHECKING:
    from megascale.parallel.activation_store import ActivationStore


def build_store(config: RunConfig, pp_rank: int, device: Device) -> ActivationStore | None:
    """Build the store, if a policy needs one. The memory of offloaded block inputs is allocated here: CUDA may wait for
    the device to pin it, and in a step the device may be waiting for other ranks.
    """
    train = config.train
    if not (train.activation_offload or may_have(train, "host", "nvme")):
        return None
    from megascale.parallel.activation_media import FileMemory, HostMemory
    from megascale.parallel.activation_store import ActivationStore
    from megascale.plan.account.memory import JobMemory

    host = HostMemory(device.host_buffers())
    if train.activation_offload:
        job = JobMemory(config)
        inputs = job.moved_bytes(pp_rank, "host") // job.sizes.stream
        for piece in [host.pool.take(job.sizes.stream) for _ in range(inputs)]:
            host.pool.give(piece)
    files = FileMemory(device.host_buffers(), train.memory_dir) if train.memory_dir else host  # of a dry run: no files
    return ActivationStore({"host": host, "nvme": files})
