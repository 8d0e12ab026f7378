"""Token datasets of a split, each repeated for as many epochs as a run needs.

megatron-core shuffles all epochs of a run together, which makes the sample order depend on the length of the run. Here
every epoch has its own shuffle seed, and a run can be extended without changing the order of its samples. Nothing is
read before its first use, and few epochs are open at a time (`OpenEpochs`), because a small dataset may repeat
thousands of times, and a blend may have thousands of datasets. No torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megascale.config.dataset_files import (
    NO_LABELS_HINT,
    PREPARE_AGAIN_HINT,
    DatasetFiles,
    document_range,
    read_dataset_files,
    without_labels,
)
from megascale.core.errors import DataError
from megascale.core.seeds import seed_of
from megascale.data.mix.mixture_spec import MixtureSpec
from megascale.data.read.epoch_index import EpochIndex, IndexShape, Piece
from megascale.data.read.index_files import IndexKey, open_index
from megascale.data.read.indexed_dataset import IndexedDataset, map_dataset

if TYPE_CHECKING:
    from megascale.data.read.block_cache import Block, BlockCache


@dataclass
class DatasetSource:
    """The dataset `prefix`: its files, and the documents that the split reads. `cache`: of all remote datasets."""

    spec: MixtureSpec
    prefix: str
    cache: BlockCache | None

    @cached_property
    def files(self) -> DatasetFiles:
        return read_dataset_files(self.prefix)

    @cached_property
    def shape(self) -> IndexShape:
        """The documents and tokens, as samples if they are concatenated.

        Raises: DataError for files that cannot be used, and for fewer tokens than a sample has, or no label.
        """
        first, last = document_range(self.files.documents, self.spec.fractions)
        tokens, length = self.files.tokens_in(first, last), self.spec.seq_length
        if tokens <= length:
            raise DataError(
                f"{self.prefix}: {tokens} tokens to {'train' if self.spec.is_train else 'validate'} on, "
                f"fewer than one sample of {length} + 1",
                hint="more data, another data.split, or a shorter model.seq_length",
            )
        if problem := without_labels(self.spec.data, self.files, first, last):
            raise DataError(problem, hint=NO_LABELS_HINT)
        return IndexShape(first, last, tokens, length)

    def lengths(self) -> np.ndarray:
        """The lengths of all documents of the dataset, in tokens.

        Raises: DataError for a negative length among those that are read
        """
        lengths = self.open().lengths
        if int(lengths[self.shape.first : self.shape.last].min(initial=0)) < 0:
            raise DataError(f"{self.prefix}.idx is damaged: a document has a negative length", hint=PREPARE_AGAIN_HINT)
        return lengths

    @cached_property
    def buckets(self) -> dict[int, IndexShape]:
        """The shape of each bucket of decomposed documents, by the tokens of its pieces. All are counted at once."""
        from megascale.data.read.decomposed_index import decomposed_shapes

        assert self.spec.decomposition is not None, "only decomposed documents have buckets"
        return {**decomposed_shapes(self.shape, self.lengths(), self.spec.decomposition.pieces)}

    @cached_property
    def index_facts(self) -> dict[str, Any]:
        """The dataset, and the order of its documents, that the indices of all epochs are of: as at the first use."""
        facts: dict[str, Any] = {"prefix": self.prefix, "version": self.files.versions[0]}
        if self.spec.data.document_order_file and self.spec.is_train:
            from megascale.data.read.document_order import order_identity

            facts["order"] = order_identity(self.spec.data.document_order_file)
        return facts

    def open(self) -> IndexedDataset:
        return map_dataset(self.prefix, self.files, self.cache)


OpenEpoch = tuple[IndexedDataset, EpochIndex]
"""The files of a dataset and the index of one of its epochs."""


class OpenEpochs:
    """The epochs of datasets used last, at most `capacity`: limits of open files and memory maps. An epoch that is
    closed is opened again at its next use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._open: OrderedDict[Hashable, OpenEpoch] = OrderedDict()

    def get(self, key: Hashable, open_epoch: Callable[[], OpenEpoch]) -> OpenEpoch:
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        while len(self._open) >= self.capacity:
            self._open.popitem(last=False)
        epoch = self._open[key] = open_epoch()
        return epoch


class EpochDataset:
    """The samples of a dataset, epoch after epoch, every epoch shuffled with its own seed.

    `open_epochs`: the open epochs of all datasets of the split. `expected`: counts the samples that the run reads; the
    index of each further epoch that they need is built while the epoch before is read. `piece`: tokens of the pieces of
    a bucket, which alone are read then.
    """

    def __init__(
        self, source: DatasetSource, open_epochs: OpenEpochs, expected: Callable[[], int], piece: int | None = None
    ) -> None:
        self.prefix = source.prefix
        self.piece = piece
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
        if self._source.spec.data.packing != "best_fit":
            return self._source.shape
        from megascale.data.read.best_fit import best_fit_shape

        return best_fit_shape(self._source.shape, self._source.lengths())

    @property
    def epochs(self) -> int:
        """Epochs that the expected samples are from."""
        return -(-expected // self.shape.samples) if (expected := self._expected()) else 0

    def open(self, index: int) -> None:
        """Open the files and the epoch of a sample; the epoch's index is built if no process has."""
        self._epoch(index // self.shape.samples)

    def read(self, index: int) -> np.ndarray:
        """The tokens [s + 1] of a sample, i64, or fewer and the rest is padding. Samples never end."""
        files, _ = self._epoch(index // self.shape.samples)
        try:
            pieces = self.pieces(index)
            if len(blocks := files.missing(pieces)) > 1:  # a single one is fetched as it is read
                blocks[0].file.cache.fetch(blocks)
            tokens = np.concatenate([files.read(*piece) for piece in pieces], dtype=np.int64, casting="same_kind")
        except (IndexError, ValueError) as error:
            raise self._changed(index, str(error)) from None
        if not self.shape.fewest_tokens <= len(tokens) <= self.shape.seq_length + 1:
            raise self._changed(index, f"its documents have {len(tokens)} tokens")
        return tokens

    def missing(self, indices: Iterable[int]) -> list[Block]:
        blocks: dict[Block, None] = {}
        for epoch, numbers in groupby(sorted(indices), key=lambda index: index // self.shape.samples):
            pieces = (piece for number in numbers for piece in self.pieces(number))
            blocks |= dict.fromkeys(self._epoch(epoch)[0].missing(pieces))
        return list(blocks)

    def pieces(self, index: int) -> list[Piece]:
        epoch, number = divmod(index, self.shape.samples)
        files, found = self._epoch(epoch)
        return found.pieces(number, files.lengths)

    def index_key(self, epoch: int) -> IndexKey:
        """The index of an epoch. The seed is numpy's, which are u32."""
        bucket = [] if self.piece is None else [self.piece]
        seed = seed_of(self._source.spec.seed, "epoch", epoch, *bucket) % 2**32
        return IndexKey(self._source.index_facts, epoch, seed, self.shape)

    @property
    def index_folder(self) -> Path:
        return self._source.spec.index_folder

    def _epoch(self, epoch: int) -> OpenEpoch:
        def open_epoch() -> OpenEpoch:
            files, key = self._source.open(), self.index_key(epoch)
            opened = files, open_index(self.index_folder, key, files)
            if epoch + 1 < self.epochs and not (following := self.index_key(epoch + 1)).is_small:
                from megascale.data.read.index_builder import build_in_background

                build_in_background(self.index_folder, following)
            return opened

        return self._open_epochs.get((self.prefix, self.piece, epoch), open_epoch)

    def _changed(self, index: int, what: str) -> DataError:
        key = self.index_key(index // self.shape.samples)
        path = self.index_folder / key.file_name
        name, remove = (
            ("its index", "") if key.is_small else (f"its index {path}", "remove that file and start again; ")
        )
        hint = f"{remove}files of a dataset must stay as they are while a run reads them"
        return DataError(f"sample {index} of {self.prefix} is not as {name} says: {what}", hint=hint)
