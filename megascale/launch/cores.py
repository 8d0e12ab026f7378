"""A bound on the processor time of some processes together, by the kernel's control groups.

Hosts of a testbed share this machine's cores: without a bound the core of a host that waits for its network works for
another, which hides communication as no cluster does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from megascale.core.errors import Exit, MegascaleError

PERIOD_US = 5000
"""Microseconds in which processor time is dealt out; a process that has used its part pauses until the next."""

_ROOT = Path("/sys/fs/cgroup")
_MEND = "ask for no bound, or use a machine where root can write control groups of the cpu controller"


class CoresError(MegascaleError):
    """A bound that this machine cannot set."""

    exit_status = Exit.CONFIG


class Cores:
    """`count` cores' worth of time for the processes that join, such as 0.25. `name` is the group's.

    Raises: CoresError
    """

    def __init__(self, name: str, count: float) -> None:
        if not 1000 / PERIOD_US <= count < math.inf:
            raise CoresError(f"{count:g} cores for a host", mend=f"{1000 / PERIOD_US} or more")
        quota = round(count * PERIOD_US)
        version2 = (_ROOT / "cgroup.controllers").is_file()
        self.folder = (_ROOT if version2 else _ROOT / "cpu") / name
        try:
            if version2:
                (_ROOT / "cgroup.subtree_control").write_text("+cpu")
            self.folder.mkdir()
            if version2:
                (self.folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            else:
                (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self.folder / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            remove(self.folder)
            raise CoresError(f"processor time cannot be bounded: {error}", mend=_MEND) from None

    def bounded(self, command: Sequence[str]) -> list[str]:
        """A command that puts itself, and what it starts, under the bound."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]


def remove(folder: Path) -> None:
    """Remove a group whose processes have been killed; nothing if there is none."""
    for _ in range(100):  # the last may be on their way out
        try:
            folder.rmdir()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError:
            time.sleep(0.01)
        else:
            return
