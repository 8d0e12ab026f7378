"""The identity of a token dataset: sizes, and a digest of a few pieces of its files, read in milliseconds."""

from __future__ import annotations

import hashlib
from pathlib import Path

PIECE_BYTES = 64 << 10
"""Bytes read at the head, in the middle and at the end of each file."""


def dataset_identity(prefix: str) -> str:
    """Return the sizes of PREFIX.idx and PREFIX.bin and a digest of pieces of both, or the error of a file that cannot
    be read. A dataset that was replaced has another identity, unless it differs between the pieces only.
    """
    digest, sizes = hashlib.sha256(), []
    try:
        for ending in (".idx", ".bin"):
            with open(f"{prefix}{ending}", "rb") as file:
                size = file.seek(0, 2)
                sizes.append(size)
                for start in (0, size // 2, max(size - PIECE_BYTES, 0)):
                    file.seek(start)
                    digest.update(file.read(PIECE_BYTES))
    except OSError as error:
        return f"{Path(error.filename or prefix).name} cannot be read: {error.strerror}"
    return f"{sizes[1]} bytes of tokens, digest {digest.hexdigest()[:16]}"
