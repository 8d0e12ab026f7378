"""The folder of a run, and what tells it from an empty place, such as its mount point while its file system is away.

Who begins a run makes its folder, with a token: a file of ids, a line each. The driver of a job says which folder an
attempt must find. An attempt that does not find it has met a fault of storage, unless copies in memory are there, from
which it goes on in a folder made anew (`RunFolder.restore`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megascale.core.errors import CheckpointError
from megascale.core.files import exists, write_text
from megascale.core.limits import os_error_hint

TOKEN = ".memory"
"""Name of the token: the id of the folder, then those of the starts whose copies in memory count, the last one first. A
folder made anew, or a copy of a folder at another place, is another run to copies in memory.
"""

LOGS = "logs"
METRICS_FILE = "metrics.jsonl"

TOKEN_VARIABLE = "MEGASCALE_RUN_TOKEN"  # environment variable of a rank: the token that the driver has read last

SAVED_MARKER = ".saved"
"""File in a run's folder that names the folder of its checkpoints, once there was one. If all are missing at the next
start the storage may not be mounted, and the run must not start from scratch.
"""


def read_token(folder: Path, env: Mapping[str, str] = os.environ) -> tuple[str, list[str]]:
    """Return the ids of a run's folder and of its starts; begin the token of a run of which no driver has said one.

    Raises: CheckpointError if the token cannot be read or written, LostFolderError if the driver knows another
    """
    path, (known_id, *known) = folder / TOKEN, env.get(TOKEN_VARIABLE, "").splitlines() or [""]
    try:
        if not known_id and not exists(path):
            folder.mkdir(parents=True, exist_ok=True)
            write_token(folder, uuid.uuid4().hex, "")
        run_id, *starts = path.read_text(encoding="ascii").splitlines() or [""]
    except FileNotFoundError:
        raise LostFolderError(folder) from None
    except (OSError, UnicodeDecodeError) as error:
        hint = "see its folder; without the file the copies in memory are lost, and no checkpoint on storage"
        raise CheckpointError(f"{path} cannot be used: {error}", hint=hint) from None
    if known_id not in ("", run_id):
        raise LostFolderError(folder)
    starts += [start for start in known if start not in starts]
    return run_id, starts or [""]


def write_token(folder: Path, run_id: str, *starts: str) -> None:
    """Write the token of a run's folder. Raises: CheckpointError"""
    try:
        write_text(folder / TOKEN, "".join(f"{each}\n" for each in (run_id, *starts)))
    except OSError as error:
        what = f"cannot write {folder / TOKEN}: {error.strerror}"
        raise CheckpointError(what, hint=os_error_hint(error, "a folder that can be written")) from None


def check_known(folder: Path) -> None:
    """Check that a run's folder is the one that the driver knows, if there is a driver. Raises: CheckpointError"""
    if os.environ.get(TOKEN_VARIABLE):
        read_token(folder)


def saved_folder(folder: Path) -> str | None:
    """The folder of checkpoints at a run's last save, from `SAVED_MARKER`; None without a save."""
    try:
        return (folder / SAVED_MARKER).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def write_saved_marker(folder: Path, checkpoints: str) -> None:
    """Write `SAVED_MARKER` into a run's folder. A failure is ignored: only the check for lost checkpoints is lost."""
    with contextlib.suppress(OSError, CheckpointError):
        check_known(folder)
        write_text(folder / SAVED_MARKER, f"{checkpoints}\n")


def check_not_lost(path: Path) -> None:
    """Check that a file in a run's folder, which was there before, is there or may be made anew: not in an empty place.

    Raises: FileNotFoundError
    """
    if not exists(path) and not exists(path.parent / TOKEN):
        raise FileNotFoundError(errno.ENOENT, "the run's folder is lost", str(path.parent))


class LostFolderError(CheckpointError):
    """The folder of a run is not where the run began."""

    def __init__(self, folder: Path) -> None:
        what = f"the run's folder {folder} is lost: it was renamed or removed, or its file system is not mounted"
        super().__init__(what, hint="mount it or put it back, then launch the job once more")


def copies_folder(parent: Path, run_id: str, token: Path, node: str = "") -> Path:
    """Return the folder of a run's copies in memory on a host, or on a node, of which a host may have several:
    parent/megascale-UID/KEY, and node-NAME in it. `parent`: of all runs of all users; the key follows from the id in
    the run's token and from the path of that file, `token`.
    """
    key = hashlib.sha256(f"{run_id} {token}".encode()).hexdigest()[:16]
    of_run = parent / f"megascale-{os.geteuid()}" / key
    return of_run / f"node-{re.sub(r'[^A-Za-z0-9.-]', '_', node)}" if node else of_run


@dataclass(frozen=True)
class RunFolder:
    """The folder that an attempt must find: its `path` without links, and its `token`, as the driver has read it last.

    `checkpoints`, `memory`: as in `[checkpoint]`, the folder of checkpoints, and that of copies in memory, "" without
    any. `wait_s`: seconds that an attempt waits for the folder.
    """

    path: str
    token: str
    checkpoints: str
    memory: str
    wait_s: float

    def read_again(self) -> RunFolder:
        """Return the folder with its present token. Raises: CheckpointError"""
        run_id, starts = read_token(Path(self.path), {TOKEN_VARIABLE: self.token.partition("\n")[0]})
        return replace(self, token="\n".join((run_id, *starts)))

    def copies(self, node: str) -> Path:
        """Return the folder of the run's copies in memory on a node."""
        return copies_folder(Path(self.memory), self.token.partition("\n")[0], Path(self.path) / TOKEN, node)

    def restore(self, node: str) -> bool:
        """Make the folder anew if the node has copies in memory, from which training can go on.

        Raises: OSError, CheckpointError
        """
        if not any(self.copies(node).glob("rank-*.json")):
            return False
        folder = Path(self.path)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / SAVED_MARKER, f"{self.checkpoints}\n")  # no start from scratch if the copies do not serve
        write_token(folder, *self.token.splitlines())
        return True
