"""CPU quota: a limit on the processor time of a set of processes, by a control group of the kernel.

The hosts of a testbed share this machine's cores. Without a quota the core of a host that waits for the network works
for another host, and hides communication as in no real cluster.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

from megascale.core.errors import Exit, MegascaleError
from megascale.core.files import is_file

PERIOD_US = 5000
"""Microseconds of the quota's period; processes that have used the quota pause until the next period."""

_ROOT = Path("/sys/fs/cgroup")
_HINT = "set no quota, or use a machine where root can write control groups of the cpu controller"


class CpuQuotaError(MegascaleError):
    """A CPU quota that this machine cannot set."""

    exit_status = Exit.CONFIG


class CpuQuota:
    """A quota of `cores`, such as 0.25, in each period for the processes that join the control group `name`.

    Raises: CpuQuotaError
    """

    def __init__(self, name: str, cores: float, period_us: int = PERIOD_US) -> None:
        if not 1000 / period_us <= cores < math.inf:
            raise CpuQuotaError(f"{cores:g} cores for a host", hint=f"{1000 / period_us} or more")
        quota = round(cores * period_us)
        version2 = is_file(_ROOT / "cgroup.controllers")
        self.cgroup = (_ROOT if version2 else _ROOT / "cpu") / name
        try:
            if version2:
                (_ROOT / "cgroup.subtree_control").write_text("+cpu")
            self.cgroup.mkdir()
            if version2:
                (self.cgroup / "cpu.max").write_text(f"{quota} {period_us}")
            else:
                (self.cgroup / "cpu.cfs_period_us").write_text(str(period_us))
                (self.cgroup / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            remove_cgroup(self.cgroup)
            raise CpuQuotaError(f"the processor time of a host cannot be limited: {error}", hint=_HINT) from None

    def wrap_command(self, command: Sequence[str]) -> list[str]:
        """Wrap a command so that the command and its children run under the quota."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.cgroup / "cgroup.procs"), *command]

    def limit(self, pids: Sequence[int]) -> None:
        """Let running processes join, with the children that they start from now on."""
        _move(pids, self.cgroup)

    def lift(self) -> None:
        """Remove the quota; its processes run on without one."""
        _move([int(pid) for pid in (self.cgroup / "cgroup.procs").read_text().split()], self.cgroup.parent)
        remove_cgroup(self.cgroup)


def _move(pids: Sequence[int], cgroup: Path) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (cgroup / "cgroup.procs").write_text(str(pid))


def remove_cgroup(folder: Path) -> None:
    """Remove a control group whose processes have been killed; do nothing if there is no such group."""
    for _ in range(100):  # killed processes may still be exiting
        try:
            folder.rmdir()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError:
            time.sleep(0.01)
        else:
            return
