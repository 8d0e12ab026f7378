"""Fully sharded weights: a unit's weights are gathered before its modules run, and released after them (`zero = 3`).

A unit is the buckets of modules that run together: the embedding, each layer with its experts, the head with the final
norm. The schedule says when a chunk's weights are needed (`schedule.resharding`), the list of its units in which order:

    GATHER_F, GATHER_B   append the chunk's units to the uses, in the order of the network or backwards
    F, B                 enter every unit before its modules run, and leave it after them
    RELEASE              leave the last unit; or release all of the chunk's, if they are kept

With `reshard = "forward"` the first `SLOTS` uses are gathered at any time, into a pool of as many slots, each of the
largest unit's size: that of the running unit, and of the next one, which arrives meanwhile. In backward it sets out
before the gradients of the last unit (Rajbhandari et al. 2020; Zhao et al. 2023). Uses in a row share a gather.
Otherwise a chunk's units are gathered at once, and have memory from GATHER to RELEASE.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from torch import Tensor

from megascale.comm.work import Work
from megascale.parallel.bucket import Bucket

SLOTS = 2


@dataclass(frozen=True, eq=False)
class Unit:
    """The buckets of modules of a chunk that run together."""

    chunk: int
    buckets: Sequence[Bucket]

    @property
    def nbytes(self) -> int:
        return sum(bucket.sharded.gathered_bytes for bucket in self.buckets)


@dataclass(eq=False)
class _Use:
    """A gather of a unit's `buckets` for `times` uses in a row. Once it has begun, `wholes` has the bytes of each, in
    the pool's `slot` if there is one.
    """

    unit: Unit
    buckets: Sequence[Bucket]
    times: int = 1
    slot: Tensor | None = None
    wholes: dict[Bucket, Tensor] = field(default_factory=dict)
    arriving: list[Work] = field(default_factory=list)


class ShardedWeights:
    """The weights of this rank's `units`, by chunk in the order of the network, while they are gathered.

    `streams`: through a pool of slots, unit by unit. `overlap`: gathers run in the background.
    """

    def __init__(self, units: Sequence[Sequence[Unit]], *, streams: bool, overlap: bool) -> None:
        self._units, self._streams, self._overlap = units, streams, overlap
        largest = max(unit.nbytes for unit in chain(*units))
        self._shard = next(chain(*units)).buckets[0].weights.view(torch.uint8)
        self._free = [self._shard.new_empty(largest) for _ in range(SLOTS if streams else 0)]
        self._uses = deque[_Use]()

    def gather(self, chunk: int, *, backward: bool) -> None:
        """Announce that a chunk's weights are needed next, and start to gather what there is memory for."""
        for unit in self._units[chunk][:: -1 if backward else 1]:
            if self._streams and self._uses and self._uses[-1].unit is unit:
                self._uses[-1].times += 1
            else:
                held = () if self._streams else {bucket for use in self._uses for bucket in use.buckets}
                self._uses.append(_Use(unit, [bucket for bucket in unit.buckets if bucket not in held]))
        self._start()

    def enter(self, chunk: int, at: int) -> None:
        """Have the weights of unit `at` of a chunk: on a GPU the stream waits, not the host."""
        unit = self._units[chunk][at]
        use = self._uses[0] if self._streams else next(use for use in self._uses if use.unit is unit)
        assert use.unit is unit, f"unit {at} of chunk {chunk} runs before {use.unit.buckets[0].label}"
        for work in use.arriving:
            work.wait()
        use.arriving.clear()
        for bucket, whole in use.wholes.items():
            bucket.bind_gathered(whole)

    def leave(self) -> None:
        """Leave the unit that has run, and start to gather the next but one into its slot; or keep it."""
        if self._streams:
            self._uses[0].times -= 1
            if not self._uses[0].times:
                self._drop(self._uses[0])
                self._start()

    def release(self, chunk: int) -> None:
        """Release a chunk's weights after the actions that need them."""
        self.leave()
        for use in () if self._streams else [use for use in self._uses if use.unit.chunk == chunk]:
            self._drop(use)

    def _start(self) -> None:
        for use in islice(self._uses, SLOTS if self._streams else None):
            if use.wholes or not use.buckets:
                continue
            use.slot = self._free.pop() if self._streams else None
            sizes = [bucket.sharded.gathered_bytes for bucket in use.buckets]
            with use.buckets[0].group.recorder.memory_kind("buffers"):
                parts = map(self._shard.new_empty, sizes) if use.slot is None else use.slot[: sum(sizes)].split(sizes)
                use.wholes = dict(zip(use.buckets, parts, strict=True))
            for bucket, whole in use.wholes.items():
                use.arriving += bucket.sharded.gather_into(whole)
            for work in use.arriving if not self._overlap else ():
                work.wait()

    def _drop(self, use: _Use) -> None:
        """End a use; a bucket that another one needs as well passes to it."""
        self._uses.remove(use)
        for bucket, whole in use.wholes.items():
            heirs = [other for other in self._uses if bucket in other.unit.buckets and other.wholes]
            if heirs and bucket not in heirs[0].wholes:
                heirs[0].wholes[bucket] = whole
            else:
                bucket.bind_weights(None)
        if use.slot is not None:
            self._free.append(use.slot)
