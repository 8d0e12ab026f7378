"""The choice of `train.memory = "auto"` at the start of a run (`with_chosen_memory`)."""

from __future__ import annotations

from megascale.comm.mesh import Mesh
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Problem
from megascale.device import Device
from megascale.train.plan_record import own_profile

STACK = "megascale"  # the profile of this trainer


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
        policies = with_policies(config, hardware, profiles.stack_on(hardware, STACK)).train.memory
    train = with_memory(config.train, mesh.world.control.broadcast(policies, "memory"))
    return config.model_copy(update={"train": train})
