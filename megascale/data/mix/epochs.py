"""A token dataset, repeated for as many epochs as a run needs.

megatron-core shuffles all epochs of a run together, which makes the sample order depend on the length of the run. Here
every epoch has its own shuffle seed, and a run can be extended without changing the order of its samples. Nothing is
read before its first use, and few epochs are open at a time (`OpenEpochs`), because a small dataset may repeat
thousands of times, and a blend may have thousands of datasets. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megascale.config.dataset_files import SplitName
from megascale.config.run import RunConfig
from megascale.core.errors import DataError
from megascale.core.seeds import seed_of
from megascale.data.mix.dataset_source import DatasetSource
from megascale.data.mix.open_epochs import OpenEpochs
from megascale.data.read.best_fit_index import best_fit_shape
from megascale.data.read.block_cache import Block
from megascale.data.read.document_order import order_identity
from megascale.data.read.epoch_index import EpochIndex, IndexShape
from megascale.data.read.index_builder import build_in_background
from megascale.data.read.index_files import IndexKey, open_index
from megascale.data.read.indexed_dataset import IndexedDataset


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a document, which are a part of a sample."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class OpenEpoch:
    """The files of a dataset and the index of one of its epochs."""

    files: IndexedDataset
    index: EpochIndex

    def pieces(self, number: int) -> list[Piece]:
        """The parts of a sample, in their order."""
        return [Piece(*piece) for piece in self.index.pieces(number, self.files.lengths)]

    def read(self, number: int) -> np.ndarray:
        """The tokens [s + 1] of a sample, i64."""
        pieces = [(piece.document, piece.start, piece.stop) for piece in self.pieces(number)]
        if len(blocks := self.files.missing(pieces)) > 1:  # a single one is fetched as it is read
            blocks[0].file.cache.fetch(blocks)
        parts = [self.files.read(*piece) for piece in pieces]
        return np.concatenate(parts, dtype=np.int64, casting="same_kind")


class EpochDataset:
    """The samples of a dataset, epoch after epoch, every epoch shuffled with its own seed.

    `open_epochs`: the open epochs of all datasets of the split. `expected`: counts the samples that the run reads; the
    index of each further epoch that they need is built while the epoch before is read. `piece`: tokens of the pieces of
    a bucket, which alone are read then.
    """

    def __init__(
        self,
        config: RunConfig,
        split: SplitName,
        source: DatasetSource,
        open_epochs: OpenEpochs,
        expected: Callable[[], int],
        piece: int | None = None,
    ) -> None:
        self.prefix = source.prefix
        self.piece = piece
        self._config = config
        self._split = split
        self._source = source
        self._open_epochs = open_epochs
        self._expected = expected

    @cached_property
    def shape(self) -> IndexShape:
        """The documents and tokens of an epoch.

        Raises: DataError for files that cannot be used, and for fewer tokens than a sample has.
        """
        if self.piece is not None:
            return self._source.buckets[self.piece]
        if self._config.data.packing != "best_fit":
            return self._source.shape
        return best_fit_shape(self._source.shape, self._source.lengths())

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the dataset."""
        return self._source.files.token_bytes

    @property
    def epochs(self) -> int:
        """Epochs that the expected samples are from."""
        return -(-expected // self.shape.samples) if (expected := self._expected()) else 0

    def open(self, index: int) -> None:
        """Open the files and the epoch of a sample; the epoch's index is built if no process has."""
        self._epoch(index // self.shape.samples)

    def read(self, index: int) -> np.ndarray:
        """The tokens [s + 1] of a sample, i64, or fewer and the rest is padding. Samples never end."""
        epoch, number = divmod(index, self.shape.samples)
        opened = self._epoch(epoch)
        try:
            tokens = opened.read(number)
        except (IndexError, ValueError) as error:
            raise self._changed(index, str(error)) from None
        if not self.shape.fewest_tokens <= len(tokens) <= self.shape.seq_length + 1:
            raise self._changed(index, f"its documents have {len(tokens)} tokens")
        return tokens

    def missing(self, indices: Iterable[int]) -> list[Block]:
        """Return the blocks that samples need of a remote dataset and that are not in the cache."""
        by_epoch: dict[int, list[int]] = {}
        for epoch, number in (divmod(index, self.shape.samples) for index in indices):
            by_epoch.setdefault(epoch, []).append(number)
        blocks: dict[Block, None] = {}
        for epoch, numbers in by_epoch.items():
            opened = self._epoch(epoch)
            pieces = (piece for number in numbers for piece in opened.pieces(number))
            found = opened.files.missing((piece.document, piece.start, piece.stop) for piece in pieces)
            blocks |= dict.fromkeys(found)
        return list(blocks)

    def pieces(self, index: int) -> list[Piece]:
        """The parts of a sample, in their order."""
        epoch, number = divmod(index, self.shape.samples)
        return self._epoch(epoch).pieces(number)

    def index_key(self, epoch: int) -> IndexKey:
        """The index of an epoch. The seed is numpy's, which are u32."""
        bucket = [] if self.piece is None else [self.piece]
        seed = seed_of(self._config.train.seed, "epoch", epoch, *bucket) % 2**32
        return IndexKey(self._facts, epoch, seed, self.shape)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """The dataset, and the order of its documents, that the indices of all epochs are of: as at the first use."""
        facts: dict[str, Any] = {"prefix": self.prefix, "version": self._source.files.versions[0]}
        if self._config.data.order and self._split == "train":
            facts["order"] = order_identity(self._config.data.order)
        return facts

    @property
    def index_folder(self) -> Path:
        """The folder of the sample indices."""
        return self._source.index_folder

    def _epoch(self, epoch: int) -> OpenEpoch:
        return self._open_epochs.get((self.prefix, self.piece, epoch), lambda: self._open_epoch(epoch))

    def _open_epoch(self, epoch: int) -> OpenEpoch:
        files, key = self._source.open(), self.index_key(epoch)
        opened = OpenEpoch(files, open_index(self.index_folder, key, files))
        if epoch + 1 < self.epochs:
            build_in_background(self.index_folder, self.index_key(epoch + 1))
        return opened

    def _changed(self, index: int, what: str) -> DataError:
        key = self.index_key(index // self.shape.samples)
        path = self.index_folder / key.file_name
        name, remove = (
            ("its index", "") if key.is_small else (f"its index {path}", "remove that file and start again; ")
        )
        hint = f"{remove}files of a dataset must stay as they are while a run reads them"
        return DataError(f"sample {index} of {self.prefix} is not as {name} says: {what}", hint=hint)
