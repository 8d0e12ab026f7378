"""The communication timeout: the time limit of a wait for another rank, in all groups at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from megascale.config.launch import CommConfig, LaunchConfig

SetTimeout = Callable[[timedelta], object]


class Timeout:
    """The timeout of all groups of a mesh: `launch.start_timeout_s` before `tighten` and within `extended`, else
    `comm.timeout_s`.

    A dead rank ends the run at once: on gloo its connections break, on NCCL the launcher ends the other ranks. A stuck
    rank, or a host without power, ends the run when an operation of a waiting rank exceeds the timeout: with an error
    on gloo and in shared memory, by the watchdog on NCCL. NCCL counts from the moment the host issues an operation,
    which may be a whole step ahead of the device.

    An operation keeps the timeout of its start, and the timeout of the waiting rank applies: ranks need not change
    theirs at the same moment. A rank may `tighten` once all ranks are known to be close, as after the totals of a step.
    """

    def __init__(self, launch: LaunchConfig = LaunchConfig(), comm: CommConfig = CommConfig()) -> None:
        self._start, self._step = timedelta(seconds=launch.start_timeout_s), timedelta(seconds=comm.timeout_s)
        self._setters: list[SetTimeout] = []
        self.current = self._start

    def register(self, set_timeout: SetTimeout) -> None:
        """Call `set_timeout` with the current timeout, and at every change."""
        self._setters.append(set_timeout)
        set_timeout(self.current)

    def register_group(self, process_group: dist.ProcessGroup | None) -> None:
        """Register a process group of torch.distributed; None is the default group of all ranks."""
        self.register(lambda limit: _set_pg_timeout(limit, process_group))

    def tighten(self) -> None:
        """Change to `comm.timeout_s` after the first step, when no operation takes minutes."""
        self._change(self._step)

    @contextmanager
    def extended(self) -> Iterator[None]:
        """Apply `launch.start_timeout_s` within a `with` block in which ranks wait for storage."""
        before = self.current
        self._change(self._start)
        try:
            yield
        finally:
            self._change(before)

    def _change(self, limit: timedelta) -> None:
        if limit != self.current:
            self.current = limit
            for set_timeout in self._setters:
                set_timeout(limit)
