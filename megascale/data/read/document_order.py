"""The order of documents from a file, `data.document_order_file`: in place of a shuffle, such as related documents next
to each other (SPLiCe, Staniszewski et al. 2023). A .npy file of the numbers of documents in the dataset, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megascale.core.errors import DataError

HINT = "a .npy file with the number of each document once, such as numpy.save writes"


def order_identity(path: str) -> list[str | int]:
    """The file's path, size and time of change, by which an index is known. Raises: DataError"""
    try:
        facts = Path(path).stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", hint=HINT) from None
    return [path, facts.st_size, facts.st_mtime_ns]


def read_order(identity: Sequence[str | int], first: int, last: int) -> np.ndarray:
    """Read the order of documents [first, last), i32, from the file of this identity.

    Raises: DataError for a file that cannot be read, has another identity, or has not each of these documents once
    """
    path = str(identity[0])
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint=HINT) from None
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise DataError(f"{path} has numbers of {found.dtype} in shape {list(found.shape)}", hint=HINT)
    if len(found) != last - first:
        what = f"{path} has {len(found)} documents, and there are {last - first} to train on, {first} to {last - 1}"
        raise DataError(what, hint=HINT)
    seen = np.zeros(last - first, dtype=bool)
    inside = (found >= first) & (found < last)
    seen[np.asarray(found[inside], dtype=np.int64) - first] = True
    if not inside.all() or not seen.all():
        missing = first + int((~seen).argmax())
        raise DataError(f"{path} has not each document once: {missing} is missing", hint=HINT)
    order = found.astype(np.int32)
    if list(identity) != order_identity(path):  # after all is read
        what = f"{path} was replaced while the run reads by it: all epochs have the same order"
        raise DataError(what, hint="start again to read by the new file, or put back the old one with its time (cp -p)")
    return order
