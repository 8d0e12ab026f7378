"""A dataset of a split: its files, and the documents of it that the split reads. Nothing is read before its first use.
No torch.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np

from megascale.config.data import DataConfig
from megascale.config.dataset_files import (
    NO_LABELS_HINT,
    PREPARE_AGAIN_HINT,
    DatasetFiles,
    SplitName,
    document_range,
    read_dataset_files,
    without_labels,
)
from megascale.config.decomposition import piece_lengths
from megascale.config.run import RunConfig, dataset_prefixes
from megascale.core.errors import DataError
from megascale.data.block_cache import BlockCache
from megascale.data.decomposed_index import DecomposedShape, decomposed_shapes
from megascale.data.epoch_index import IndexShape
from megascale.data.indexed_dataset import IndexedDataset, map_dataset


class DatasetSource:
    """The dataset `prefix`. `fractions`: the range [start, stop) of its documents to read, as fractions of their
    number. `cache`: of all remote datasets.
    """

    def __init__(
        self, config: RunConfig, split: SplitName, prefix: str, fractions: tuple[float, float], cache: BlockCache
    ) -> None:
        self.prefix = prefix
        self._config = config
        self._split = split
        self._fractions = fractions
        self._cache = cache

    @cached_property
    def files(self) -> DatasetFiles:
        """The headers of the files."""
        return read_dataset_files(self.prefix)

    @cached_property
    def shape(self) -> IndexShape:
        """The documents and tokens, as samples if they are concatenated.

        Raises: DataError for files that cannot be used, and for fewer tokens than a sample has, or no label.
        """
        first, last = document_range(self.files.documents, self._fractions)
        tokens, length = self.files.tokens_in(first, last), self._config.model.seq_length
        if tokens <= length:
            raise DataError(
                f"{self.prefix}: {tokens} tokens to {'train' if self._split == 'train' else 'validate'} on, "
                f"fewer than one sample of {length} + 1",
                hint="more data, another data.split, or a shorter model.seq_length",
            )
        if problem := without_labels(self._config.data, self.files, first, last):
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
    def buckets(self) -> dict[int, DecomposedShape]:
        """The shape of each bucket, by the tokens of its pieces. All are counted at once."""
        return decomposed_shapes(self.shape, self.lengths(), piece_lengths(self._config.model, self._config.data))

    def open(self) -> IndexedDataset:
        """Memory-map the files."""
        return map_dataset(self.prefix, self.files, self._cache)

    @property
    def index_folder(self) -> Path:
        """The folder of the sample indices."""
        return index_folder(self._config.data)


def index_folder(data: DataConfig) -> Path:
    """Return the folder of the sample indices: `data.cache`, or the folder cache beside the first dataset of train."""
    return Path(data.cache) if data.cache else Path(dataset_prefixes(data.train)[0]).parent / "cache"
