"""Where the copies in memory of a run are: MEMORY_DIR/megascale-UID/RUN_KEY, and node-NAME in it on nodes with names.

The key follows from ids in a file of the run's folder, so a folder made anew, or a copy of a folder, is another run. A
file beside the copies names the run, for whoever finds them: copies outlive their processes, and even the run's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from megascale.core.flight_record import SHARED_MEMORY
from megascale.core.units import format_bytes

TOKEN = ".memory"
"""Name of the file with the run's ids, a line each; the first is the folder's."""

RUN_FILE = "run"
"""Name of the file, beside copies, with the run's folder. Processes that make copies hold a shared lock of it."""


@dataclass(frozen=True)
class StoredCopies:
    """Copies in `folder` of the run whose folder is `run`. `bytes`: of their memory; `in_use`: a process of the run is
    there; `lost`: the run's folder is gone, or was made anew, so that no start can resume from them.
    """

    folder: Path
    run: Path
    bytes: int
    in_use: bool
    lost: bool

    @property
    def state(self) -> str:
        """What they are good for."""
        if self.in_use:
            return "in use by the run"
        return "its folder is gone" if self.lost else "a start of the run resumes from them"

    def remove(self) -> bool:
        """Free their memory, and return True, unless they are in use."""
        with open(self.folder / RUN_FILE, "rb") as file:
            if free := _lock_alone(file):
                remove_copies(self.folder)
        return free


def copies_folder(parent: Path, run_id: str, token: Path, node: str = "") -> Path:
    """Return the folder of a run's copies on a host, or on a node, of which a host may have several. `parent`: of all
    runs of all users; `token`: the file with the run's ids.
    """
    key = hashlib.sha256(f"{run_id} {token}".encode()).hexdigest()[:16]
    of_run = _of_user(parent) / key
    return of_run / f"node-{re.sub(r'[^A-Za-z0-9.-]', '_', node)}" if node else of_run


def _of_user(parent: Path) -> Path:
    return parent / f"megascale-{os.geteuid()}"


def copies_on_node(parent: Path, run: Path, node: str) -> Path | None:
    """Return the folder of a run's copies on a node; None if the run has never made any. `run`: its folder."""
    token = run.resolve() / TOKEN
    try:
        run_id, _, _ = token.read_text(encoding="ascii").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return copies_folder(parent, run_id, token, node)


def mark_in_use(folder: Path, run: Path) -> FileIO:
    """Name the run of the copies in `folder`. Returns a file, which says until it is closed that they are in use.

    Raises: OSError
    """
    file = FileIO(os.open(folder / RUN_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
    fcntl.flock(file, fcntl.LOCK_SH)
    file.write(os.fsencode(run))  # all ranks write the same
    return file


def _lock_alone(file: BinaryIO) -> bool:
    """Lock the file of a run's name until it is closed; return False if a process of the run has it locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def stored_copies(parent: Path) -> Iterator[StoredCopies]:
    """Find the copies of all runs of this user on this host. `parent`: of all runs of all users."""
    for file in sorted(_of_user(parent).rglob(RUN_FILE)):
        with contextlib.suppress(FileNotFoundError):  # they are being removed
            with open(file, "rb") as named:
                run, in_use = Path(os.fsdecode(named.read())), not _lock_alone(named)
            folder, of_run = file.parent, copies_on_node(parent, run, "")
            size = sum(copy.stat().st_size for copy in folder.glob("rank-*"))
            yield StoredCopies(folder, run, size, in_use, of_run not in (folder, folder.parent))


def copies_notice(parent: Path, run: Path, nodes: str = "") -> str:
    """Say where copies of a run that has ended stay in memory, and what removes them; "" without any. `nodes`: names of
    the nodes that have some, on this host or others.
    """
    here = [f"{one.folder} ({format_bytes(one.bytes)})" for one in stored_copies(parent) if one.run == run.resolve()]
    if not here and not nodes:
        return ""
    where = "".join([f" on {nodes}" if nodes else "", f", here in {', '.join(here)}" if here else ""])
    command = f"megascale ckpt copies {run.resolve()} --remove"
    command += "" if parent == SHARED_MEMORY else f" --memory-dir {parent}"
    return f"copies of the state stay in memory{where}: `{command}` on each host removes them"


def remove_copies(folder: Path) -> None:
    """Remove the copies of a run or of one of its nodes, and the folders of run and user if they are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: copies of another node or run
        for parent in folder.parents:
            parent.rmdir()
            if parent == _of_user(parent.parent):
                return
