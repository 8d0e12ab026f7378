"""Blended samples of megatron-core's datasets, in an order that depends on the seed and the sample index alone.

Sample: tokens, labels, loss mask. Mixture: samples of datasets by weight. MockMixture: random tokens. build_mixture:
the mixture of a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megascale.config.dataset_files import split_source
from megascale.config.run import RunConfig, dataset_prefixes
from megascale.core.errors import DataError
from megascale.data.epochs import EpochDataset, SplitName, build_cached, megatron_datasets
from megascale.data.open_epochs import OpenEpochs
from megascale.launch.host_limits import max_open_epochs


@dataclass(frozen=True)
class Sample:
    """A training sample: tokens and labels [s], i64; mask [s] in {0, 1}, or None if every label counts in the loss."""

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor | None


class Mixture:
    """`num_samples` samples of a split, blended by weight. Validation never repeats data, and may have fewer samples.

    The constructor writes cached indices on rank 0, which must therefore construct first; `prepare_indices` writes the
    indices of later epochs. `mixture[index]` raises DataError for a token outside the model's vocabulary.
    """

    def __init__(self, config: RunConfig, split: SplitName, num_samples: int) -> None:
        source, documents = split_source(config.data, split)
        prefixes = [Path(prefix) for prefix in dataset_prefixes(source)]
        open_epochs = OpenEpochs(max_open_epochs(config, len(prefixes)))
        datasets = [EpochDataset(config, split, prefix, documents, open_epochs) for prefix in prefixes]
        weights = [1.0] if source is None or isinstance(source, str) else [weight for weight, _ in source]
        shares = [weight / sum(weights) for weight in weights]
        if split == "valid":
            num_samples = min(
                [num_samples, *(int(d.samples_per_epoch / share) for d, share in zip(datasets, shares, strict=True))]
            )
        self.num_samples = num_samples
        self._vocab = config.model.vocab_size
        self._names = ", ".join(dataset_prefixes(source))
        self._datasets = datasets
        self._samples: Any = datasets[0] if len(datasets) == 1 else _blend(datasets, shares, num_samples)
        if split == "valid":
            self.prepare_indices(0, num_samples)

    def prepare_indices(self, start: int, stop: int) -> None:
        """Have rank 0 write the indices of samples [start, stop), before any rank reads these samples."""
        stop = min(stop, self.num_samples)
        if len(self._datasets) == 1:
            self._datasets[0].prepare_indices(start, stop)
            return
        dataset_ids = self._samples.dataset_index[start:stop]
        sample_ids = self._samples.dataset_sample_index[start:stop]
        for number, dataset in enumerate(self._datasets):
            ascending = sample_ids[dataset_ids == number]
            if len(ascending):
                dataset.prepare_indices(int(ascending[0]), int(ascending[-1]) + 1)

    def __getitem__(self, index: int) -> Sample:
        record = self._samples[index]
        smallest, largest = _extremes(record["tokens"], record["labels"])
        if smallest < 0 or largest >= self._vocab:
            odd = smallest if smallest < 0 else largest
            what = f"sample {index} of {self._names} has token {odd}; model.vocab_size is {self._vocab}"
            wider = "" if smallest < 0 else f"a vocabulary of at least {largest + 1}, or "
            raise DataError(what, hint=f"{wider}data that this model's tokenizer has prepared")
        mask = record["loss_mask"]
        return Sample(record["tokens"], record["labels"], None if bool(mask.all()) else mask)


def _extremes(*tensors: torch.Tensor) -> tuple[int, int]:
    """The smallest and the largest element of tensors."""
    pairs = [tensor.aminmax() for tensor in tensors]
    return min(int(pair.min) for pair in pairs), max(int(pair.max) for pair in pairs)


class MockMixture:
    """Uniformly random tokens for speed measurements. The random generator of sample i is seeded with (seed, i)."""

    def __init__(self, config: RunConfig, split: SplitName, samples: int) -> None:
        self.num_samples = samples
        self._seed = (config.train.seed << 1) + (split == "valid")
        self._shape = (config.model.seq_length + 1,)
        self._vocab = config.model.vocab_size

    def __getitem__(self, index: int) -> Sample:
        drawn = np.random.default_rng((self._seed, index)).integers(self._vocab, size=self._shape)
        ids = torch.from_numpy(drawn)
        return Sample(ids[:-1], ids[1:], None)

    def prepare_indices(self, start: int, stop: int) -> None:
        return None


def build_mixture(config: RunConfig, split: SplitName, num_samples: int) -> Mixture | MockMixture:
    """The mixture of a split, as `[data]` configures."""
    return MockMixture(config, split, num_samples) if config.data.mock else Mixture(config, split, num_samples)


def _blend(datasets: list[EpochDataset], shares: list[float], samples: int) -> Any:
    """Blend datasets: at any sample, a dataset is at most one sample ahead of its share, and less than two behind."""
    dataset_class = megatron_datasets("blended_dataset").BlendedDataset
    return build_cached(dataset_class, datasets, shares, samples, config=datasets[0].config)
