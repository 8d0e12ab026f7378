"""Blended samples of token datasets, in an order that depends on the seed and the sample index alone. No torch.

Sample: tokens, labels, loss mask. Mixture: samples of datasets by weight. MockMixture: random tokens. build_mixture:
the mixture of a configuration.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from megascale.config.dataset_files import READERS, split_source
from megascale.config.run import RunConfig, dataset_prefixes
from megascale.core.errors import DataError
from megascale.core.readable import is_url
from megascale.core.skipped_ranges import order_index
from megascale.data.blend import MOST_AHEAD
from megascale.data.changing_blend import ChangingBlend, blend_parts
from megascale.data.epochs import EpochDataset, SplitName
from megascale.data.open_epochs import OpenEpochs
from megascale.launch.host_limits import max_open_epochs


@dataclass(frozen=True)
class Sample:
    """A training sample: tokens and labels [s], i64; mask [s] in {0, 1}, or None if every label counts in the loss."""

    tokens: np.ndarray
    labels: np.ndarray
    mask: np.ndarray | None


class Mixture:
    """The samples of a split, blended by weight; no file is opened before its first use. `expected`: samples that a run
    reads, up to which the indices of further epochs are built ahead.

    `mixture[index]` raises DataError for a token outside the model's vocabulary.
    """

    def __init__(self, config: RunConfig, split: SplitName, expected: int = 0) -> None:
        source, fractions = split_source(config.data, split)
        prefixes = dataset_prefixes(source)
        weights = [1.0] if source is None or isinstance(source, str) else [weight for weight, _ in source]
        open_epochs = OpenEpochs(max_open_epochs(config, len(prefixes)))
        self.shares = [weight / sum(weights) for weight in weights]
        self.blend = ChangingBlend(blend_parts(weights, config.data.weights if split == "train" else []))
        self._skipped = config.data.skip if split == "train" else []
        self.datasets = [
            EpochDataset(config, split, prefix, fractions, open_epochs, self.blend.count(number, self.order(expected)))
            for number, prefix in enumerate(prefixes)
        ]
        self._vocab = config.model.vocab_size

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

    def fetch(self, indices: Iterable[int]) -> None:
        """Fetch what samples need of remote datasets, many blocks at a time, before they are read."""
        by_dataset: dict[EpochDataset, list[int]] = {}
        for dataset, number in map(self.locate, indices):
            if is_url(dataset.prefix):
                by_dataset.setdefault(dataset, []).append(number)
        for dataset, numbers in by_dataset.items():
            dataset.fetch(numbers)

    def stored_bytes(self, index: int) -> int:
        """Bytes of a sample's tokens in its dataset."""
        dataset, _ = self.locate(index)
        return (dataset.shape.seq_length + 1) * dataset.token_bytes

    def __getitem__(self, index: int) -> Sample:
        dataset, number = self.locate(index)
        tokens = dataset.read(number)
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or largest >= self._vocab:
            odd = smallest if smallest < 0 else largest
            what = f"sample {index}, from {dataset.prefix}, has token {odd}; model.vocab_size is {self._vocab}"
            wider = "" if smallest < 0 else f"a vocabulary of at least {largest + 1}, or "
            raise DataError(what, hint=f"{wider}data that this model's tokenizer has prepared")
        return Sample(tokens[:-1], tokens[1:], None)


class MockMixture:
    """Uniformly random tokens for speed measurements. The random generator of sample i is seeded with (seed, i)."""

    def __init__(self, config: RunConfig, split: SplitName) -> None:
        self._seed = (config.train.seed << 1) + (split == "valid")
        self._shape = (config.model.seq_length + 1,)
        self._vocab = config.model.vocab_size

    def __getitem__(self, index: int) -> Sample:
        ids = np.random.default_rng((self._seed, index)).integers(self._vocab, size=self._shape)
        return Sample(ids[:-1], ids[1:], None)


def build_mixture(config: RunConfig, split: SplitName, expected: int = 0) -> Mixture | MockMixture:
    """The mixture of a split, as `[data]` configures. `expected`: samples that the run reads."""
    return MockMixture(config, split) if config.data.mock else Mixture(config, split, expected)
