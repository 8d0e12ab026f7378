"""The choice of `train.memory = "auto"` at the start of a run (`with_chosen_memory`)."""

from __future__ import annotations

from megascale.comm.mesh import Mesh
from megascale.config.run import RunConfig
from megascale.config.section import AUTO
from megascale.config.train import LayerPolicy
from megascale.core.errors import ConfigError, Problem
from megascale.device import Device
from megascale.train.plan_record import own_profile

STACK = "megascale"  # the profile of this trainer


def with_chosen_memory(config: RunConfig, device: Device, mesh: Mesh) -> RunConfig:
    """Return the configuration with a policy for every layer, which rank 0 chooses by the profile of its device: ranks
    agree whatever their own profiles say.

    Raises: ConfigError on rank 0 without a profile, or if no policies fit
    """
    if config.train.memory != AUTO:
        return config
    from megascale.plan.search.memory_policy import with_memory  # the planner, which other runs do not load

    policies = _choose(config, device) if mesh.rank == 0 else None
    return with_memory(config, mesh.world.control.broadcast(policies, "memory"))


def _choose(config: RunConfig, device: Device) -> list[LayerPolicy]:
    from megascale.plan.search.memory_policy import choose
    from megascale.plan.simulate import profiles

    name, reason = own_profile(device)
    if not name:
        hint = "a list of policies, such as one that megascale plan --hardware chooses"
        raise ConfigError([Problem("configuration", "train.memory", f"auto needs the planner's times: {reason}", hint)])
    hardware = profiles.hardware(name)
    return choose(config, hardware, profiles.stack_on(hardware, STACK))
