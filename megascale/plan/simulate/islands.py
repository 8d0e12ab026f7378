"""Where the ranks of a layout lie in islands: whole stages (`parallel.far_axis` = pp), or a part of each (dp)."""

from __future__ import annotations

import math

from megascale.config.parallel import ParallelConfig
from megascale.config.run import RunConfig
from megascale.layout.parameters import parameter_count
from megascale.plan.simulate.link_time import Route
from megascale.plan.simulate.profiles import Hardware


def count_islands(hardware: Hardware, world: int) -> int:
    """Count the islands of a job of `world` ranks."""
    return math.ceil(world / hardware.islands.devices) if hardware.islands else 1


def stage_islands(hardware: Hardware, p: ParallelConfig, world: int) -> list[range]:
    """List the islands of each pipeline stage."""
    count, stage = count_islands(hardware, world), world // p.pp
    if hardware.islands is None or count == 1 or p.far_axis == "dp":
        return [range(count)] * p.pp
    devices = hardware.islands.devices
    return [range(rank * stage // devices, ((rank + 1) * stage - 1) // devices + 1) for rank in range(p.pp)]


def by_stage(hardware: Hardware, p: ParallelConfig, world: int) -> Hardware:
    """Return the hardware as the groups of a stage see it: with far_axis = dp islands end after each part of the stage,
    and all stages share their links.
    """
    islands, count = hardware.islands, count_islands(hardware, world)
    if islands is None or count == 1 or p.far_axis == "pp":
        return hardware
    part = {"devices": max(1, world // p.pp // count), "bandwidth": islands.bandwidth / p.pp}
    return hardware.model_copy(update={"islands": islands.model_copy(update=part)})


def far_message(hardware: Hardware, near: Route, p: ParallelConfig, world: int, size: int) -> float:
    """Time a message of `size` bytes between stages of two islands, while all ranks of a stage send."""
    islands, stage = hardware.islands, world // p.pp
    if islands is None:
        return near.message(size)
    share = islands.bandwidth * hardware.attained.network / min(stage, islands.devices)
    return size / min(near.bandwidth, share) + islands.latency


def outer_seconds(hardware: Hardware, config: RunConfig) -> float | None:
    """Time the exchange of all weights' outer steps between sites, an island each; None without links of islands."""
    islands, sites = hardware.islands, config.sites
    if islands is None or config.world_size > islands.devices:
        return None
    sent = (sites.count - 1) * sites.sent_bytes(parameter_count(config.model), config.train.element_bytes[1])
    return sent / (islands.bandwidth * hardware.attained.network) + sites.fragments * islands.latency
