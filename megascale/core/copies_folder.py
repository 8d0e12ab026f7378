"""Where the copies in memory of a run are: MEMORY_DIR/megascale-UID/RUN_KEY, and node-NAME in it on nodes with names.

The key follows from the id in the token of the run's folder (`core.run_folder`), and from the token's path.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from pathlib import Path


def copies_folder(parent: Path, run_id: str, token: Path, node: str = "") -> Path:
    """Return the folder of a run's copies on a host, or on a node, of which a host may have several. `parent`: of all
    runs of all users; `token`: the file of the run's ids.
    """
    key = hashlib.sha256(f"{run_id} {token}".encode()).hexdigest()[:16]
    of_run = parent / f"megascale-{os.geteuid()}" / key
    return of_run / f"node-{re.sub(r'[^A-Za-z0-9.-]', '_', node)}" if node else of_run


def remove_copies(folder: Path) -> None:
    """Remove the copies of a run or of one of its nodes, and the folders of run and user if they are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: copies of another node or run
        for parent in folder.parents:
            parent.rmdir()
            if parent.name.startswith("megascale-"):
                return
