"""The wear of a node's NVMe drives by saved tensors that move there (`DriveWear`)."""

from __future__ import annotations

from typing import NamedTuple

from megascale.core.units import format_bytes
from megascale.plan.simulate.profiles import Node

DAY_S = 86400


class DriveWear(NamedTuple):
    """Bytes that a rank writes in a `step`, and a node to its drives in a `day`; `days` until they have been written to
    as often as they are rated for.
    """

    step: int
    day: float
    days: float

    def describe(self, node: Node) -> str:
        """Describe the wear in a line."""
        drives, rated = node.drives.count, node.drives.rated_bytes / 1e12
        return (
            f"a rank writes {format_bytes(self.step)} a step to NVMe, a node {format_bytes(self.day)} a day: its "
            f"{drives} drives reach their rating of {rated:,.0f} TB each in {self.days:,.0f} days"
        )


def drive_wear(step: int, world_size: int, node: Node, step_s: float) -> DriveWear:
    """Count the writes of a node whose ranks each write `step` bytes in a step of `step_s` seconds."""
    day = step * min(node.devices, world_size) * DAY_S / step_s
    return DriveWear(step, day, node.drives.count * node.drives.rated_bytes / day)
