"""Construction of the optimizer: its rules, the guard of its steps, and where its state is updated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.comm.mesh import Mesh
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError, Problem
from megascale.core.registry import Card
from megascale.device import Device
from megascale.layout.param_groups import ParamGroups
from megascale.ops import select
from megascale.ops.select import OpContext
from megascale.optim.sharded import ShardedOptimizer
from megascale.parallel.linear_gemms import HIGH_PRECISION_GEMMS, LinearGemms
from megascale.parallel.param_and_grad_buffers import ParamAndGradBuffers
from megascale.parallel.tp_overlap import TensorParallel

if TYPE_CHECKING:
    from megascale.optim.step_guard import StepGuard
    from megascale.optim.updates import HostUpdate


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
    host = build_host_update(config, device) if settings.offload == "host" else None
    return ShardedOptimizer(buffers.buckets, mesh, settings, update_rules, guard, host), guard


def rule_gemms(config: RunConfig, tp: TensorParallel) -> Callable[[str], LinearGemms]:
    """Return the GEMMs of a linear layer by its name, those of the rule if its card has some."""
    group = ParamGroups(config.optimizer).default
    target = group.facts["input_projection"]
    if not target:
        return lambda name: HIGH_PRECISION_GEMMS
    from megascale.parallel.projected_gemms import projected_gemms

    return projected_gemms(config.model, Card(group.rule, "", target).load(), group.all_options, tp)


def build_host_update(config: RunConfig, device: Device) -> HostUpdate:
    """Build the update of state in host memory, which takes this rank's share of the cores."""
    from megascale.optim.updates import HostUpdate

    torch.set_num_threads(device.host_threads())
    rules = {name: OPTIMIZERS[name].load() for name in ParamGroups(config.optimizer).rules}
    return HostUpdate(device.host_buffers(), rules, update_stride(config, device), config.optimizer.offload_subgroup)


def update_stride(config: RunConfig, device: Device) -> int:
    """Return `optimizer.offload_stride`, or the stride that the profile of the hardware gives; on a CPU, whose memory
    is the host's, 0.

    Raises: ConfigError without a profile that states the rates
    """
    if config.optimizer.offload_stride is not None or device.is_cpu:
        return config.optimizer.offload_stride or 0
    from megascale.plan.simulate.host_update import host_update
    from megascale.plan.simulate.profiles import hardware
    from megascale.train.plan_record import profile_of

    profile = profile_of(device.name, device.total_memory())
    update = host_update(config, hardware(profile)) if profile else None
    if update is None:
        what = f"needs a hardware profile with host_bandwidth and memory_bandwidth, and {device.name} has none"
        raise ConfigError(
            [Problem("optimizer.offload_stride", "auto", what, "a number, such as 2; 0: all on the host")]
        )
    return update.best_stride
