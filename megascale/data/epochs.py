"""A token dataset, repeated for as many epochs as a run needs.

megatron-core shuffles all epochs of a run together, which makes the sample order depend on the length of the run. Here
every epoch has its own shuffle seed, and a run can be extended without changing the order of its samples. Nothing is
read before its first use, and few epochs are open at a time (`OpenEpochs`), because a small dataset may repeat
thousands of times, and a blend may have thousands of datasets. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megascale.config.dataset_files import (
    PREPARE_AGAIN_HINT,
    DatasetFiles,
    SplitName,
    document_range,
    read_dataset_files,
)
from megascale.config.run import RunConfig, dataset_prefixes
from megascale.core.errors import DataError
from megascale.core.seeds import seed_of
from megascale.data.best_fit_index import BestFitShape, best_fit_shape
from megascale.data.block_cache import BlockCache
from megascale.data.document_order import order_identity
from megascale.data.epoch_index import EpochIndex, IndexShape
from megascale.data.index_builder import build_in_background
from megascale.data.index_files import IndexKey, open_index
from megascale.data.indexed_dataset import IndexedDataset, map_dataset
from megascale.data.open_epochs import OpenEpochs


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
        self.files.fetch(pieces)
        parts = [self.files.read(*piece) for piece in pieces]
        return np.concatenate(parts, dtype=np.int64, casting="same_kind")


class EpochDataset:
    """The samples of a dataset, epoch after epoch, every epoch shuffled with its own seed.

    `fractions`: the range [start, stop) of the dataset's documents to read, as fractions of their number.
    `open_epochs`: the open epochs of all datasets of the split. `expected`: samples that the run reads; the index of
    each further epoch that they need is built while the epoch before is read.
    """

    def __init__(
        self,
        config: RunConfig,
        split: SplitName,
        prefix: str,
        fractions: tuple[float, float],
        open_epochs: OpenEpochs,
        expected: int,
    ) -> None:
        self.prefix = prefix
        self._config = config
        self._split = split
        self._fractions = fractions
        self._open_epochs = open_epochs
        self._expected = expected

    @cached_property
    def _files(self) -> DatasetFiles:
        return read_dataset_files(self.prefix)

    @cached_property
    def shape(self) -> IndexShape:
        """The documents and tokens of an epoch.

        Raises: DataError for files that cannot be used, and for fewer tokens than a sample has.
        """
        first, last = document_range(self._files.documents, self._fractions)
        tokens, length = self._files.tokens_in(first, last), self._config.model.seq_length
        if tokens <= length:
            raise DataError(
                f"{self.prefix}: {tokens} tokens to {'train' if self._split == 'train' else 'validate'} on, "
                f"fewer than one sample of {length} + 1",
                hint="more data, another data.split, or a shorter model.seq_length",
            )
        shape = IndexShape(first, last, tokens, length)
        if self._config.data.packing == "concat":
            return shape
        lengths = map_dataset(self.prefix, self._files, self._cache).lengths
        if int(lengths[first:last].min(initial=0)) < 0:
            raise DataError(f"{self.prefix}.idx is damaged: a document has a negative length", hint=PREPARE_AGAIN_HINT)
        return best_fit_shape(shape, lengths)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the dataset."""
        return self._files.token_bytes

    @property
    def epochs(self) -> int:
        """Epochs that the expected samples are from."""
        return -(-self._expected // self.shape.samples)

    def read(self, index: int) -> np.ndarray:
        """The tokens [s + 1] of a sample, i64, or fewer and the rest is padding. Samples never end."""
        epoch, number = divmod(index, self.shape.samples)
        opened = self._epoch(epoch)
        try:
            tokens = opened.read(number)
        except (IndexError, ValueError) as error:
            raise self._changed(index, str(error)) from None
        wanted = self.shape.seq_length + 1
        if len(tokens) != wanted and not (isinstance(self.shape, BestFitShape) and 0 < len(tokens) < wanted):
            raise self._changed(index, f"its documents have {len(tokens)} tokens")
        return tokens

    def fetch(self, indices: Iterable[int]) -> None:
        """Fetch what samples need of a remote dataset, many blocks at a time, before they are read."""
        by_epoch: dict[int, list[int]] = {}
        for epoch, number in (divmod(index, self.shape.samples) for index in indices):
            by_epoch.setdefault(epoch, []).append(number)
        for epoch, numbers in by_epoch.items():
            opened = self._epoch(epoch)
            pieces = (piece for number in numbers for piece in opened.pieces(number))
            opened.files.fetch((piece.document, piece.start, piece.stop) for piece in pieces)

    def pieces(self, index: int) -> list[Piece]:
        """The parts of a sample, in their order."""
        epoch, number = divmod(index, self.shape.samples)
        return self._epoch(epoch).pieces(number)

    def index_key(self, epoch: int) -> IndexKey:
        """The index of an epoch. The seed is numpy's, which are u32."""
        seed = seed_of(self._config.train.seed, "epoch", epoch) % 2**32
        dataset: dict[str, Any] = {"prefix": self.prefix, "version": self._files.versions[0]}
        if self._config.data.order and self._split == "train":
            dataset["order"] = order_identity(self._config.data.order)
        return IndexKey(dataset, epoch, seed, self.shape)

    @cached_property
    def _cache(self) -> BlockCache:
        data = self._config.data
        return BlockCache(self.index_folder, data.cache_bytes, data.retry_timeout_s)

    @property
    def index_folder(self) -> Path:
        """The folder of the sample indices: `data.cache`, or the folder cache beside the first dataset of train."""
        if self._config.data.cache:
            return Path(self._config.data.cache)
        return Path(dataset_prefixes(self._config.data.train)[0]).parent / "cache"

    def _epoch(self, epoch: int) -> OpenEpoch:
        return self._open_epochs.get((self.prefix, epoch), lambda: self._open_epoch(epoch))

    def _open_epoch(self, epoch: int) -> OpenEpoch:
        files, key = map_dataset(self.prefix, self._files, self._cache), self.index_key(epoch)
        opened = OpenEpoch(files, open_index(self.index_folder, key, files))
        if epoch + 1 < self.epochs:
            build_in_background(self.index_folder, self.index_key(epoch + 1))
        return opened

    def _changed(self, index: int, what: str) -> DataError:
        hint = "files of a dataset, and of data.cache, must stay as they are while a run reads them"
        return DataError(f"sample {index} of {self.prefix} is not as its index says: {what}", hint=hint)
