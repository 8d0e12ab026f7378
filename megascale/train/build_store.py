"""Construction of the store of what blocks save for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megascale.config.run import RunConfig
from megascale.config.train import may_have
from megascale.device import Device

if TYPE_CHECKING:
    from megascale.parallel.activation_media import Medium
    from megascale.parallel.activation_store import ActivationStore


def build_store(config: RunConfig, pp_rank: int, device: Device) -> ActivationStore | None:
    """Build the store, if a policy needs one, and allocate the memory of offloaded block inputs."""
    train = config.train
    if not (train.activation_offload or may_have(train, "host", "nvme")):
        return None
    from megascale.parallel.activation_media import FileMemory, HostMemory
    from megascale.parallel.activation_store import ActivationStore
    from megascale.plan.account.memory import JobMemory

    host = HostMemory(device.host_buffers())
    media: dict[str, Medium] = {"host": host}
    if train.activation_offload:
        memory = JobMemory(config)
        host.reserve(memory.host_inputs(pp_rank), memory.sizes.stream)
    if train.memory_dir is not None:
        media["nvme"] = FileMemory(device.host_buffers(), train.memory_dir)
    return ActivationStore(media)
