"""Failure reports: the file in which a rank says how it ended. `rank_ends` reports what it says.

When a rank ends its peers fail next and blame their own peers. A rank therefore writes a file as it ends: the time, and
an error, a stop or an end in order, with a flag for a lost peer. The first cause (`driver.classify`) is the first error
without the flag, or a rank that ended before without a file, whatever its status: a library may have called
`os._exit(0)`. When a rank is stuck, NCCL's watchdog ends the waiting ranks by SIGABRT; the cause is then the rank that
NCCL's flight recorder shows as missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megascale.core.errors import CorruptStateError, Exit, LostPeerError, MegascaleError
from megascale.core.files import write_text
from megascale.core.rank import Rank

ERROR_FILE = "MEGASCALE_ERROR_FILE"
"""Environment variable: path of the file in which this rank says how it ended; `%t` stands for the rank."""

ERROR_FILE_NAME = "rank-{}.error.json"  # name of that file in the launcher's folder of logs

TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: path of torchrun's error file, in torchrun's format, for torchrun's summary. It holds what our
own file does, too, for observers.
"""

PEER_LOST_DELAY_S = 1.5
"""Seconds by which a rank with a lost peer delays its exit: torchrun and srun blame the first rank to exit."""

_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "software caused connection abort",
    "no route to host",
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "gloo connectfullmesh failed",
    "nccl communicator was aborted",
    "collective operation timeout",
    "remote process exited",
    "failed to recv",
    "wait timeout after",
)


def exit_status_of(error: BaseException) -> int:
    """Return the exit status of a process for an error."""
    return int(error.exit_status) if isinstance(error, MegascaleError) else int(Exit.UNCLASSIFIED)


def is_peer_lost(error: BaseException) -> bool:
    """Return True if an error only reports the loss of another rank."""
    if isinstance(error, MegascaleError):
        return isinstance(error, LostPeerError)
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(phrase in text for phrase in _PEER_LOST)


def write_error(error: BaseException, rank: Rank, explain: Callable[[], str] = str) -> str:
    """Write this rank's error to the launcher's files, and return what is known of it.

    If the rank only lost a peer, delay by PEER_LOST_DELAY_S. `explain`: called meanwhile, to say more of the lost peer.
    """
    ours = isinstance(error, MegascaleError)
    text = str(error) if ours else "".join(traceback.format_exception_only(error)).strip()
    peer_lost = is_peer_lost(error)
    peers = list(error.peers) if isinstance(error, LostPeerError) else []
    named = list(error.ranks) if isinstance(error, CorruptStateError) else []
    kind = type(error).__name__
    record = _write_record(
        rank, text, exit_status_of(error), kind=kind, peer_was_lost=peer_lost, peers=peers, named=named
    )
    said = f"{rank}: {text}"
    if peer_lost:
        until = time.monotonic() + PEER_LOST_DELAY_S
        explanation = explain()
        text += explanation
        # torchrun's summary calls the first rank that failed the root cause, and never one that ended with status 0
        said = f"the cause: {explanation.lstrip('; ') or 'another rank'}. {rank}: lost another rank: {text}"
        time.sleep(max(0.0, until - time.monotonic()))
    if path := os.environ.get(TORCHRUN_ERROR_FILE):
        torchrun_error = {"message": said, "extraInfo": {"timestamp": str(int(time.time()))}}
        write_text(Path(path), json.dumps({"message": torchrun_error, **record}))
    return text


def write_end(rank: Rank, status: int, stop: str = "") -> bool:
    """Write that this rank has left the job in order, since a rank that ends without is the first to have failed; or
    the `stop` by a signal that ended it outside of training. Returns True if a launcher reads and reports it.
    """
    _write_record(rank, stop, status)
    return ERROR_FILE in os.environ


def _write_record(rank: Rank, what: str, status: int, **more: object) -> dict[str, Any]:
    """Write the record of this rank's end to the launcher's file, if it has named one, and return it."""
    record = {
        "time": time.time(), "rank": rank.rank, "host": rank.host, "what": what, "exit_status": status,
        "kind": "", "peer_was_lost": False, "peers": [], "named": [], **more,
    }  # fmt: skip
    if path := os.environ.get(ERROR_FILE):
        write_text(Path(path.replace("%t", str(rank.rank))), json.dumps(record))
    return record


def read_record(path: Path) -> dict[str, Any] | None:
    """Return what a rank wrote of its end: `time`, `rank`, `host`, `what` (the error, "" for an end in order), `kind`
    (the error's class), `exit_status`, `peer_was_lost`, `peers`, `named` (ranks whose state the error calls wrong);
    None if it wrote nothing.

    Raises: OSError or ValueError if its file cannot be read
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def read_records(logs: Path) -> dict[int, dict[str, Any]]:
    """Read the ranks' files by rank, the earliest first, without those that cannot be read."""
    records = []
    for path in logs.glob(ERROR_FILE_NAME.format("*")):
        with contextlib.suppress(OSError, ValueError):  # as on a file system that is away
            records.append(read_record(path) or {})
    known = sorted((record for record in records if record), key=lambda record: (record["time"], record["rank"]))
    return {record["rank"]: record for record in known}
