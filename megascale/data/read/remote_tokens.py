"""The tokens of a remote dataset, with the part of an array's interface that reading samples needs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megascale.data.read.block_cache import Block, CachedFile


class RemoteTokens:
    """The tokens of a remote file; `tokens[start:stop]` reads a range."""

    def __init__(self, file: CachedFile, dtype: np.dtype) -> None:
        self._file = file
        self.dtype = dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self._file.size // self.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        return np.frombuffer(self._file.read(start * self.itemsize, stop * self.itemsize), self.dtype)

    def missing(self, ranges: Iterable[tuple[int, int]]) -> list[Block]:
        """Return the blocks of ranges [start, stop) of tokens that are not in the cache."""
        return self._file.missing((start * self.itemsize, stop * self.itemsize) for start, stop in ranges)
