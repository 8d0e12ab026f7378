"""The wear of a node's NVMe drives by saved tensors that move there (`DriveWear`)."""

from __future__ import annotations

from typing import NamedTuple

from megascale.core.units import format_bytes
from megascale.plan.account.memory import JobMemory
from megascale.plan.simulate.profiles import Node

DAY_S = 86400


class DriveWear(NamedTuple):
    """Bytes that a rank writes in a `step`, and a node to its drives in a `day`; `days` until they have been written to
    as often as they are rated for.
    """

    step: int
    day: float
    days: float


def drive_wear(job: JobMemory, node: Node, step_s: float) -> DriveWear:
    """Count the writes of a node whose ranks are of the stage that writes most."""
    p = job.config.parallel
    step = max(job.moved_in_step(stage, "nvme") for stage in range(p.pp))
    day = step * min(node.devices, job.config.world_size) * DAY_S / step_s
    return DriveWear(step, day, node.drives.count * node.drives.rated_bytes / day)


def describe_wear(wear: DriveWear, node: Node) -> str:
    """Describe the wear in a line."""
    drives, rated = node.drives.count, node.drives.rated_bytes / 1e12
    return (
        f"a rank writes {format_bytes(wear.step)} a step to NVMe, a node {format_bytes(wear.day)} a day: its {drives} "
        f"drives reach their rating of {rated:,.0f} TB each in {wear.days:,.0f} days"
    )
