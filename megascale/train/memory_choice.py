"""Policies for the tensors that layers save: the choice of `train.memory = "auto"` at the start of a run
(`with_chosen_memory`), and the store of those that move (`build_store`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megascale.comm.mesh import Mesh
from megascale.config.run import RunConfig
from megascale.config.train import may_have
from megascale.core.errors import ConfigError, Problem
from megascale.device import Device
from megascale.train.plan_record import own_profile

if TYPE_CHECKING:
    from megascale.parallel.activation_store import ActivationStore


def with_chosen_memory(config: RunConfig, device: Device, mesh: Mesh) -> RunConfig:
    """Return the configuration with a policy for every layer, which rank 0 chooses by the profile of its device: ranks
    agree whatever their own profiles say.

    Raises: ConfigError on rank 0 without a profile, or if no policies fit
    """
    if config.train.memory != "auto":
        return config
    from megascale.plan.search.memory_policy import with_memory, with_policies  # other runs load no planner
    from megascale.plan.simulate import profiles

    policies = None
    if mesh.rank == 0:
        name, reason = own_profile(device)
        if not name:
            message = f"auto needs the planner's times: {reason}"
            hint = "a list of policies, such as one that megascale plan --hardware chooses"
            raise ConfigError([Problem("configuration", "train.memory", message, hint)])
        hardware = profiles.hardware(name)
        policies = with_policies(config, hardware, profiles.stack_on(hardware, "megascale")).train.memory
    train = with_memory(config.train, mesh.world.control.broadcast(policies, "memory"))
    return config.model_copy(update={"train": train})


def build_store(config: RunConfig, pp_rank: int, device: Device) -> ActivationStore | None:
    """Build the store, if a policy needs one. Where it has block inputs alone, their memory is allocated here: CUDA may
    wait for the device to pin it, and in a step the device may be waiting for other ranks.
    """
    train = config.train
    if not may_have(train, "full_host", "host", "nvme"):
        return None
    from megascale.parallel.activation_media import FileMemory, HostMemory
    from megascale.parallel.activation_store import ActivationStore
    from megascale.plan.account.memory import JobMemory

    host = HostMemory(device.host_buffers())
    if not may_have(train, "host"):
        job = JobMemory(config)
        inputs = job.moved_bytes(pp_rank, "host") // job.sizes.stream
        for piece in [host.pool.take(job.sizes.stream) for _ in range(inputs)]:
            host.pool.give(piece)
    files = FileMemory(device.host_buffers(), train.memory_dir) if train.memory_dir else host  # of a dry run: no files
    return ActivationStore({"host": host, "nvme": files})
