"""How long an operation may wait for another rank, for all groups at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from megascale.config.launch import LaunchConfig

Set = Callable[[timedelta], object]


class Timeout:
    """The limit of all groups of a mesh: `launch.start_timeout_s` until `tighten`, and again within `patiently`; else
    `launch.timeout_s`.

    On gloo a dead rank ends the others at once, for its connections break. On NCCL the launcher ends them. A rank that
    is stuck, or a host without power, ends the run when some rank's operation has taken this long: on gloo and in
    shared memory with an error, on NCCL its watchdog ends the process. There an operation's time counts from when the
    host issues it, which may be a whole step ahead of the device.

    An operation that has begun keeps its limit. Ranks need not change theirs at the same moment, for a limit is that of
    the rank that waits. So a rank may `tighten` once no other can be far behind, as after the totals of a step.
    """

    def __init__(self, launch: LaunchConfig = LaunchConfig()) -> None:
        self._long, self._short = timedelta(seconds=launch.start_timeout_s), timedelta(seconds=launch.timeout_s)
        self._set: list[Set] = []
        self.now = self._long

    def govern(self, set_timeout: Set) -> None:
        """Let `set_timeout` know the limit, and each change of it."""
        self._set.append(set_timeout)
        set_timeout(self.now)

    def govern_group(self, process_group: dist.ProcessGroup | None) -> None:
        """The same for a group of torch.distributed; None is that of all ranks."""
        self.govern(lambda limit: _set_pg_timeout(limit, process_group))

    def tighten(self) -> None:
        """The first step is done: nothing takes minutes any more."""
        self._change(self._short)

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """For a `with` block in which ranks wait for storage."""
        before = self.now
        self._change(self._long)
        try:
            yield
        finally:
            self._change(before)

    def _change(self, limit: timedelta) -> None:
        if limit != self.now:
            self.now = limit
            for set_timeout in self._set:
                set_timeout(limit)
