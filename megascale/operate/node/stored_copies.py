"""The copies in memory that are on this host, of whichever run (`stored_copies`).

Copies outlive the processes of their run, and even its folder. A file beside them names the run (`hold_copies`).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from shlex import quote
from typing import BinaryIO

from megascale.core.errors import CheckpointError
from megascale.core.files import SHARED_MEMORY
from megascale.core.limits import os_error_hint
from megascale.core.run_folder import TOKEN, copies_folder
from megascale.core.units import format_bytes

RUN_FILE = "run"
"""Name of the file, beside copies, with the run's folder. Processes that make copies hold a shared lock of it."""

HOLD_ATTEMPTS = 100  # attempts to make a folder that others remove meanwhile


def remove_copies(folder: Path) -> None:
    """Remove the copies of a run or of one of its nodes, and the folders of run and user if they are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: copies of another node or run
        for parent in folder.parents:
            parent.rmdir()
            if parent.name.startswith("megascale-"):
                return


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
        """Say whether they are in use, or could be."""
        if self.in_use:
            return "in use by the run"
        return "its folder is gone, or not mounted" if self.lost else "a start of the run resumes from them"

    def remove(self) -> bool:
        """Free their memory, and return True, unless they are in use."""
        with open(self.folder / RUN_FILE, "rb") as file:
            if free := _lock_alone(file):
                remove_copies(self.folder)
        return free


def hold_copies(folder: Path, run: Path) -> FileIO:
    """Make the folder of a run's copies on this host or of a node, for this user alone, with a file that names the run.
    The copies are in use until this file, which is returned, is closed.

    Raises: CheckpointError
    """
    below = [*itertools.takewhile(lambda each: each.name != f"megascale-{os.geteuid()}", (folder, *folder.parents))]
    for _ in range(HOLD_ATTEMPTS):
        try:
            for each in (below[-1].parent, *reversed(below)):
                _make_private_folder(each)
            file = FileIO(os.open(folder / RUN_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.fstat(file.fileno()).st_nlink:  # else it was removed meanwhile, with the copies
                file.write(os.fsencode(run))  # all ranks write the same
                return file
            file.close()
        except FileNotFoundError:
            continue
        except OSError as error:
            what = f"cannot write into {folder}: {error.strerror}"
            raise CheckpointError(what, hint=os_error_hint(error, "checkpoint.in_memory_dir")) from None
    raise CheckpointError(f"cannot make {folder}: it is not there once made", hint="another checkpoint.in_memory_dir")


def _make_private_folder(folder: Path) -> None:
    """Make a folder for this user alone. Raises: CheckpointError; FileNotFoundError if it is removed meanwhile"""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()  # not what a stranger's link names
        if facts.st_uid == os.geteuid() and stat.S_ISDIR(facts.st_mode):
            folder.chmod(0o700)
    except FileNotFoundError:
        raise
    except OSError as error:
        hint = os_error_hint(error, "checkpoint.in_memory_dir")
        raise CheckpointError(f"cannot make {folder}: {error.strerror}", hint=hint) from None
    if facts.st_uid != os.geteuid() or not stat.S_ISDIR(facts.st_mode):
        what = f"{folder} belongs to user {facts.st_uid}" if facts.st_uid != os.geteuid() else f"{folder} is no folder"
        raise CheckpointError(what, hint="another checkpoint.in_memory_dir")


def _lock_alone(file: BinaryIO) -> bool:
    """Lock the file of a run's name until it is closed; return False if a process of the run has it locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def stored_copies(parent: Path) -> Iterator[StoredCopies]:
    """Find the copies of all runs of this user on this host. `parent`: of all runs of all users."""
    for file in sorted((parent / f"megascale-{os.geteuid()}").rglob(RUN_FILE)):
        with contextlib.suppress(FileNotFoundError):  # they are being removed
            with open(file, "rb") as named:
                run, in_use = Path(os.fsdecode(named.read())), not _lock_alone(named)
            folder = file.parent
            size = sum(512 * copy.stat().st_blocks for copy in folder.glob("rank-*"))
            yield StoredCopies(folder, run, size, in_use, _is_lost(parent, run, folder))


def _is_lost(parent: Path, run: Path, folder: Path) -> bool:
    """Return True if the run's folder is gone, or another one than that which `folder` is of."""
    try:
        run_id, _, _ = (run / TOKEN).read_text(encoding="ascii").partition("\n")
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, UnicodeDecodeError):
        return False  # its file system does not say
    return copies_folder(parent, run_id, run / TOKEN) not in (folder, folder.parent)


def copies_notice(parent: Path, run: Path, nodes: str = "") -> str:
    """Say where copies of a run that has ended stay in memory, and what removes them; "" without any. `nodes`: names of
    the nodes that have some, on this host or others.
    """
    here = [f"{one.folder} ({format_bytes(one.bytes)})" for one in stored_copies(parent) if one.run == run.resolve()]
    if not here and not nodes:
        return ""
    where = "".join([f" on {nodes}" if nodes else "", f", here in {', '.join(here)}" if here else ""])
    command = f"megascale ckpt copies {quote(str(run.resolve()))} --remove"
    command += "" if parent == SHARED_MEMORY else f" --memory-dir {quote(str(parent))}"
    return f"copies of the state stay in memory{where}: `{command}` on each host removes them"
