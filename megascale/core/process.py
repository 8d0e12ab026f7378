"""Other processes of this host."""

from __future__ import annotations

import os


def runs(pid: int) -> bool:
    """Whether there is a process of this number, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
