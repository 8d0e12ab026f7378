"""Blended samples of token datasets, in an order that depends on the seed and the sample index alone. No torch.

Sample: tokens, labels, loss mask. Mixture: samples of datasets by weight. MockMixture: random tokens. build_mixture:
the mixture of a configuration.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from megascale.catalog.sample_weights import SAMPLE_WEIGHTS
from megascale.config.dataset_files import READERS, other_tokens_hint, split_source
from megascale.config.decomposition import decomposition, is_decomposed
from megascale.config.run import RunConfig, dataset_prefixes
from megascale.core.errors import DataError
from megascale.core.readable import is_url
from megascale.core.skipped_ranges import order_index
from megascale.data.best_fit_index import BestFitShape
from megascale.data.blend import MOST_AHEAD
from megascale.data.block_cache import BlockCache
from megascale.data.bucket_order import BucketOrder, SampleOrder
from megascale.data.changing_blend import ChangingBlend, blend_parts
from megascale.data.dataset_source import DatasetSource, index_folder
from megascale.data.document_mask import document_starts, label_mask, positions_in_documents
from megascale.data.epochs import EpochDataset, SplitName
from megascale.data.label_weights import Weigh, weigh_labels
from megascale.data.mixture_weights import MixtureWeights
from megascale.data.open_epochs import OpenEpochs
from megascale.layout.document_lengths import equal_documents
from megascale.operate.node.host_limits import max_open_epochs


@dataclass(frozen=True)
class Sample:
    """A training sample: tokens and labels [s], i64; mask [s] in {0, 1}, or the weights of the labels, f32, with
    `data.sample_weight`, or None if every label counts in the loss;
    positions [s], i64, of tokens within their documents with `data.mask = "document"`, -1 for padding, otherwise None.
    """

    tokens: np.ndarray
    labels: np.ndarray
    mask: np.ndarray | None
    positions: np.ndarray | None = None


class Mixture:
    """The samples of a split, blended by weight; no file is opened before its first use. `expected`: samples that a run
    reads, up to which the indices of further epochs are built ahead.

    `mixture[index]` raises DataError for a token outside the model's vocabulary.
    """

    def __init__(self, config: RunConfig, split: SplitName, expected: int = 0) -> None:
        source, fractions = split_source(config.data, split)
        prefixes = dataset_prefixes(source)
        weights = [1.0] if source is None or isinstance(source, str) else [weight for weight, _ in source]
        of_run = config.model, config.batch, config.data
        self._decomposition = decomposition(*of_run) if is_decomposed(config.data, split) else None
        pieces = self._decomposition.pieces if self._decomposition else [None]
        self._cache = BlockCache(index_folder(config.data), config.data.cache_bytes, config.data.retry_timeout_s)
        found = [DatasetSource(config, split, prefix, fractions, self._cache) for prefix in prefixes]
        sources = [(source, piece) for source in found for piece in pieces]
        open_epochs = OpenEpochs(max_open_epochs(config, len(sources)))
        self.shares = [weight / sum(weights) for weight in weights]
        self._parts = blend_parts(weights, config.data.weights if split == "train" else [])
        self._skipped = config.data.skip if split == "train" else []
        self._seed = config.train.seed

        self.expected = expected

        def count(number: int) -> int:
            return self.blend.count(number, self.order(self.expected))

        self.datasets = [
            EpochDataset(config, split, source, open_epochs, partial(count, number), piece)
            for number, (source, piece) in enumerate(sources)
        ]
        self._vocab = config.model.vocab_size
        name = config.data.sample_weight if split == "train" else None
        self._weigh: Weigh | None = SAMPLE_WEIGHTS[name].load() if name else None
        self._data = config.data
        self._length = config.model.seq_length

    @cached_property
    def blend(self) -> SampleOrder:
        """The dataset of each place in the order of samples; if documents are decomposed, its bucket too, for which the
        lengths of all documents are read.

        Raises: DataError for a dataset whose buckets are all empty
        """
        if self._decomposition is None:
            return ChangingBlend(self._parts)
        d, samples = self._decomposition, self.bucket_samples()
        return BucketOrder(samples, self._parts, d.turn, d.odds, d.cycle, self._seed)

    def change_weights(self, weights: MixtureWeights) -> None:
        """Follow the weights that a data policy has found. Samples before their first part cannot be read any more."""
        self.blend = weights.blend()

    def bucket_samples(self) -> list[list[int]]:
        """The samples of an epoch of each dataset in each bucket.

        Raises: DataError for a dataset whose buckets are all empty
        """
        assert self._decomposition is not None, "only decomposed documents have buckets"
        samples, buckets = [], len(self._decomposition.pieces)
        for first in range(0, len(self.datasets), buckets):
            rows = self.datasets[first : first + buckets]
            samples.append([dataset.shape.samples for dataset in rows])
            if not any(samples[-1]):
                what = f"{rows[0].prefix}: no pieces of {rows[0].piece} tokens or more fill a sample of {self._length}"
                raise DataError(what, hint="more data, or a smaller data.min_piece")
        return samples

    def check(self) -> None:
        """Open the headers of all datasets.

        Raises: DataError for files that cannot be used, or with fewer tokens than a sample has.
        """
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

    def order(self, index: int) -> int:
        """The place of a sample in the order of samples, of which `data.skip` leaves some out."""
        return order_index(index, self._skipped)

    def locate(self, index: int) -> tuple[EpochDataset, int]:
        """The dataset of a sample, and the number of the sample among those of the dataset."""
        dataset, number = self.blend.locate(self.order(index))
        return self.datasets[dataset], number

    def open(self, index: int) -> None:
        """Open what a sample is read from; its index may be built for it."""
        dataset, number = self.locate(index)
        dataset.open(number)

    def fetch(self, indices: Iterable[int], fetched: Callable[[], object] = lambda: None) -> None:
        """Fetch what samples need of all remote datasets, many blocks at a time, before they are read. `fetched` is
        called after each block.
        """
        by_dataset: dict[EpochDataset, list[int]] = {}
        for dataset, number in map(self.locate, indices):
            if is_url(dataset.prefix):
                by_dataset.setdefault(dataset, []).append(number)
        blocks = [block for dataset, numbers in by_dataset.items() for block in dataset.missing(numbers)]
        self._cache.fetch(blocks, fetched)

    def stored_bytes(self, index: int) -> int:
        """Bytes of a sample's tokens in its dataset."""
        dataset, _ = self.locate(index)
        return (dataset.shape.seq_length + 1) * dataset.token_bytes

    def __getitem__(self, index: int) -> Sample:
        dataset, number = self.locate(index)
        tokens = self._checked(index, dataset, dataset.read(number))
        filled, wanted = len(tokens), self._length + 1
        tokens = tokens if filled == wanted else np.pad(tokens, (0, wanted - filled))
        within = self._data.mask == "document"
        starts = self._starts(dataset, number, tokens) if within else np.zeros(1, dtype=np.int64)
        positions = positions_in_documents(starts, self._length, filled) if within else None
        mask = label_mask(starts[:1] if self._data.boundary_loss else starts, self._length, filled)
        if self._weigh is not None:
            mask = weigh_labels(self._weigh, self._data.sample_weight, index, dataset.prefix, tokens, mask)
        return Sample(tokens[:-1], tokens[1:], mask, positions)

    def _checked(self, index: int, dataset: EpochDataset, tokens: np.ndarray) -> np.ndarray:
        """Raises: DataError for a token outside the model's vocabulary"""
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or largest >= self._vocab:
            odd = smallest if smallest < 0 else largest
            what = f"sample {index}, from {dataset.prefix}, has token {odd}; model.vocab_size is {self._vocab}"
            raise DataError(what, hint=other_tokens_hint(max(largest + 1, self._vocab)))
        return tokens

    def positions(self, index: int) -> np.ndarray:
        """The positions of a sample's tokens within their documents [s], i64, for stages that need no tokens."""
        if self._data.eod is not None:
            positions = self[index].positions
            assert positions is not None, "only a document mask asks for positions"
            return positions
        dataset, number = self.locate(index)
        filled = sum(piece.stop - piece.start for piece in dataset.pieces(number))
        return positions_in_documents(self._starts(dataset, number), self._length, filled)

    def _starts(self, dataset: EpochDataset, number: int, tokens: np.ndarray | None = None) -> np.ndarray:
        lengths = [piece.stop - piece.start for piece in dataset.pieces(number)]
        return document_starts(lengths, tokens, self._data.eod)

    def padding(self) -> float:
        """The share of padding in the tokens of samples, with best fit; no tokens are read for it."""
        shapes = zip(self.shares, self._best_fit_shapes(), strict=True)
        return sum(share * shape.padding for share, shape in shapes)

    def left_out(self) -> int:
        """Rests of documents of a single token, which has no label after it and fills no place of its own."""
        return sum(shape.left_out for shape in self._best_fit_shapes())

    def _best_fit_shapes(self) -> list[BestFitShape]:
        return [dataset.shape for dataset in self.datasets if isinstance(dataset.shape, BestFitShape)]


class MockMixture:
    """Uniformly random tokens for speed measurements. The random generator of sample i is seeded with (seed, i). With
    `data.mask = "document"`, documents of `data.document_length` tokens fill the sample.
    """

    def __init__(self, config: RunConfig, split: SplitName) -> None:
        self._seed = (config.train.seed << 1) + (split == "valid")
        self._shape = (config.model.seq_length + 1,)
        self._vocab = config.model.vocab_size
        self._mask: np.ndarray | None = None
        self._positions: np.ndarray | None = None
        if config.data.mask == "document":
            length = config.model.seq_length
            starts = document_starts(equal_documents(length, config.data.document_length))
            self._positions = positions_in_documents(starts, length)
            self._mask = None if config.data.boundary_loss else label_mask(starts, length)

    def __getitem__(self, index: int) -> Sample:
        ids = np.random.default_rng((self._seed, index)).integers(self._vocab, size=self._shape)
        return Sample(ids[:-1], ids[1:], self._mask, self._positions)

    def positions(self, index: int) -> np.ndarray:
        """The positions of a sample's tokens within their documents [s], i64."""
        assert self._positions is not None, "only a document mask asks for positions"
        return self._positions


def build_mixture(config: RunConfig, split: SplitName, expected: int = 0) -> Mixture | MockMixture:
    """The mixture of a split, as `[data]` configures. `expected`: samples that the run reads."""
    return MockMixture(config, split) if config.data.mock else Mixture(config, split, expected)
