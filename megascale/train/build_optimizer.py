"""Construction of the optimizer: its rules, the guard of its steps, and where its state is updated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megascale.comm.mesh import Mesh
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Problem
from megascale.device import Device
from megascale.layout.param_groups import ParamGroups
from megascale.ops import select
from megascale.ops.select import OpContext
from megascale.optim.sharded import ShardedOptimizer
from megascale.parallel.param_and_grad_buffers import ParamAndGradBuffers

if TYPE_CHECKING:
    from megascale.optim.step_guard import StepGuard


def build_optimizer(
    config: RunConfig, mesh: Mesh, buffers: ParamAndGradBuffers, context: OpContext, device: Device
) -> tuple[ShardedOptimizer, StepGuard | None]:
    """Build the optimizer over this rank's shards, and the guard of its steps, if there is one."""
    settings = config.optimizer
    names = ParamGroups(settings).rules
    update_rules = {name: select.build_op("optimizer", replace(context, optimizer=name)) for name in names}
    guard = None
    if settings.zclip or settings.skip_sigma > 0:
        from megascale.optim.step_guard import StepGuard

        guard = StepGuard(settings, mesh, device.torch_device)
    host = None
    if settings.offload == "host":
        torch.set_num_threads(device.host_threads())  # this rank's share of the cores
        host, stride = device.host_buffers(), update_stride(config, device)
        settings = settings.model_copy(update={"offload_stride": stride})
    return ShardedOptimizer(buffers.buckets, mesh, settings, update_rules, guard, host), guard


def update_stride(config: RunConfig, device: Device) -> int:
    """Return `optimizer.offload_stride`, or the stride that the profile of the hardware gives; on a CPU, whose memory
    is the host's, 0.

    Raises: ConfigError without a profile that states the rates
    """
    if config.optimizer.offload_stride is not None or device.is_cpu:
        return config.optimizer.offload_stride or 0
    from megascale.plan.simulate.host_update import host_update
    from megascale.plan.simulate.profiles import hardware
    from megascale.train.plan_record import own_profile

    name, _ = own_profile(device)
    if name and (update := host_update(config, hardware(name))):
        return update.best_stride
    what = f"auto needs a hardware profile with host_bandwidth and memory_bandwidth, and {device.name} has none"
    hint = "a number, such as 2; 0: all on the host"
    raise ConfigError([Problem("configuration", "optimizer.offload_stride", what, hint)])
