"""Blended samples of token datasets, in an order that depends on the seed and the sample index alone. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from megascale.catalog.data import SAMPLE_WEIGHTS
from megascale.config.dataset_files import READERS, other_tokens_hint
from megascale.core.errors import DataError
from megascale.core.readable import is_url
from megascale.data.mix.blend import MOST_AHEAD, ChangingBlend, SampleOrder, blend_parts
from megascale.data.mix.epochs import DatasetSource, EpochDataset, OpenEpochs
from megascale.data.mix.mixture_spec import MixtureSpec
from megascale.data.mix.samples import DocumentStarts, Sample, SampleSource, document_starts, label_mask
from megascale.data.mix.skipped_ranges import order_index

if TYPE_CHECKING:
    from megascale.data.mix.data_policy import MixtureWeights
    from megascale.data.mix.label_weights import Weigh
    from megascale.data.read.block_cache import BlockCache


class Mixture(SampleSource):
    """The samples of a split, blended by weight; no file is opened before its first use. `expected`: samples that a run
    reads, up to which the indices of further epochs are built ahead.

    `mixture[index]` raises DataError for a token outside the model's vocabulary.
    """

    def __init__(self, spec: MixtureSpec, expected: int = 0) -> None:
        self.spec = spec
        self.expected = expected
        self.shares = [weight / sum(spec.weights) for weight in spec.weights]
        self._parts = blend_parts(spec.weights, spec.data.blend_schedule if spec.is_train else [])
        self._skipped = spec.data.skip_samples if spec.is_train else []
        self._followed: SampleOrder | None = None
        name = spec.data.sample_weight if spec.is_train else None
        self._weigh: Weigh | None = SAMPLE_WEIGHTS[name].load() if name else None
        open_epochs = OpenEpochs(spec.open_epochs)
        cache: BlockCache | None = None
        if any(map(is_url, spec.prefixes)):
            from megascale.data.read.block_cache import BlockCache

            cache = BlockCache(spec.index_folder, spec.data.cache_bytes, spec.data.retry_timeout_s)
        pieces = spec.decomposition.pieces if spec.decomposition else [None]
        found = [DatasetSource(spec, prefix, cache) for prefix in spec.prefixes]
        sources = [(source, piece) for source in found for piece in pieces]

        def count(number: int) -> int:
            return self.blend.count(number, self.order(self.expected))

        self.datasets = [
            EpochDataset(source, open_epochs, partial(count, number), piece)
            for number, (source, piece) in enumerate(sources)
        ]

    @property
    def blend(self) -> SampleOrder:
        """The dataset of each place in the order of samples; if documents are decomposed, its bucket too, for which the
        lengths of all documents are read.

        Raises: DataError for a dataset whose buckets are all empty
        """
        return self._configured_blend if self._followed is None else self._followed

    @cached_property
    def _configured_blend(self) -> SampleOrder:
        if (found := self.spec.decomposition) is None:
            return ChangingBlend(self._parts)
        from megascale.data.mix.bucket_order import BucketOrder

        return BucketOrder(self.bucket_samples(), self._parts, found.turn, found.odds, found.cycle, self.spec.seed)

    def follow(self, order: SampleOrder) -> None:
        """Read in this order of samples in place of the configured one."""
        self._followed = order

    def change_weights(self, weights: MixtureWeights) -> None:
        self.follow(weights.blend())

    def begin(self, consumed: int, end: int = 0) -> None:
        self.expected = end or self.expected

    def bucket_samples(self) -> list[list[int]]:
        """The samples of an epoch of each dataset in each bucket.

        Raises: DataError for a dataset whose buckets are all empty
        """
        assert self.spec.decomposition is not None, "only decomposed documents have buckets"
        samples, buckets = [], len(self.spec.decomposition.pieces)
        for first in range(0, len(self.datasets), buckets):
            rows = self.datasets[first : first + buckets]
            samples.append([dataset.shape.samples for dataset in rows])
            if not any(samples[-1]):
                what = f"no pieces of {rows[0].piece} tokens or more fill a sample of {self.spec.seq_length}"
                raise DataError(f"{rows[0].prefix}: {what}", hint="more data, or a smaller data.decompose_min_length")
        return samples

    def check(self) -> None:
        with ThreadPoolExecutor(READERS if any(is_url(d.prefix) for d in self.datasets) else 1) as pool:
            list(pool.map(lambda dataset: dataset.shape, self.datasets))

    def samples_without_repetition(self) -> int:
        """Number of samples of the blend before a dataset repeats."""
        return min(
            bisect_right(
                range(int((dataset.shape.samples + MOST_AHEAD) / share) + 1),
                dataset.shape.samples,
                key=partial(self.blend.count, number),
            )
            - 1
            for number, (dataset, share) in enumerate(zip(self.datasets, self.shares, strict=True))
        )

    def best_fit_losses(self) -> tuple[float, int]:
        """The share of padding in the tokens of samples, with best fit, for which no tokens are read; and the number of
        documents' rests of a single token, which has no label after it and fills no place of its own.
        """
        from megascale.data.read.best_fit import BestFitShape

        shapes = [dataset.shape for dataset in self.datasets if isinstance(dataset.shape, BestFitShape)]
        padding = sum(share * shape.padding for share, shape in zip(self.shares, shapes, strict=True))
        return padding, sum(shape.left_out for shape in shapes)

    def order(self, index: int) -> int:
        """The place of a sample in the order of samples, of which `data.skip_samples` leaves some out."""
        return order_index(index, self._skipped)

    def locate(self, index: int) -> tuple[EpochDataset, int]:
        """The dataset of a sample, and the number of the sample among those of the dataset."""
        dataset, number = self.blend.locate(self.order(index))
        return self.datasets[dataset], number

    def source_of(self, index: int) -> str:
        """The prefix of the dataset of a sample."""
        return self.locate(index)[0].prefix

    def open(self, index: int) -> None:
        dataset, number = self.locate(index)
        dataset.open(number)

    def fetch(self, indices: Iterable[int], fetched: Callable[[], object] = lambda: None) -> None:
        by_dataset: dict[EpochDataset, list[int]] = {}
        for dataset, number in map(self.locate, indices):
            if is_url(dataset.prefix):
                by_dataset.setdefault(dataset, []).append(number)
        blocks = [block for dataset, numbers in by_dataset.items() for block in dataset.missing(numbers)]
        if blocks:
            blocks[0].file.cache.fetch(blocks, fetched)

    def __getitem__(self, index: int) -> Sample:
        (dataset, number), data, length = self.locate(index), self.spec.data, self.spec.seq_length
        ids, vocab_size = dataset.read(number), self.spec.vocab_size
        smallest, largest, filled = int(ids.min()), int(ids.max()), len(ids)
        if smallest < 0 or largest >= vocab_size:
            odd = smallest if smallest < 0 else largest
            what = f"sample {index}, from {dataset.prefix}, has token {odd}; model.vocab_size is {vocab_size}"
            raise DataError(what, hint=other_tokens_hint(max(largest + 1, vocab_size)))
        ids = np.pad(ids, (0, length + 1 - filled)) if filled <= length else ids
        within = data.attention_mask == "document"
        starts = self._starts(dataset, number, ids) if within else np.zeros(1, dtype=np.int64)
        mask = label_mask(starts if data.eod_mask_loss else starts[:1], length, filled)
        if self._weigh is not None:
            from megascale.data.mix.label_weights import weigh_labels

            mask = weigh_labels(self._weigh, data.sample_weight, index, dataset.prefix, ids, mask)
        return Sample(ids, mask, DocumentStarts(starts, filled, length) if within else None)

    def documents(self, index: int) -> DocumentStarts:
        if self.spec.data.eod is not None:  # the tokens decide, too
            return super().documents(index)
        dataset, number = self.locate(index)
        filled = sum(piece.stop - piece.start for piece in dataset.pieces(number))
        return DocumentStarts(self._starts(dataset, number), filled, self.spec.seq_length)

    def _starts(self, dataset: EpochDataset, number: int, tokens: np.ndarray | None = None) -> np.ndarray:
        lengths = [piece.stop - piece.start for piece in dataset.pieces(number)]
        return document_starts(lengths, tokens, self.spec.data.eod)
