"""Sub-groups: equal runs of elements of a shard whose master weights and optimizer state are in host memory. They are
updated one after another, every `stride`-th on the device (`optim.host_updates`).
"""

from __future__ import annotations

from megascale.layout.buckets import ALIGNMENT

AHEAD = 2  # sub-groups whose gradients are on the host, and sub-groups whose state is on the device, at a time


def aligned_size(elements: int) -> int:
    """Return the elements of a sub-group, at least `elements`: borders are aligned as those of parameters, so that a
    kernel's vectors of elements are the same as in a whole shard.
    """
    return -(-elements // ALIGNMENT) * ALIGNMENT
