"""Samples from megatron-core's datasets, blended by weight, in an order that is a function of the seed and the sample's
number alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megascale.config.run import RunConfig, prefixes
from megascale.config.train import Blend
from megascale.core.errors import DataError
from megascale.data.epochs import Epochs, SplitName, cached, megatron


@dataclass(frozen=True)
class Sample:
    """tokens and labels [s], i64; mask [s] in {0, 1}, or None if every label counts."""

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor | None


class Mixture:
    """`samples` samples of one split; for validation as many as there are without repetition, if that is fewer.

    Building writes indices that are cached, so rank 0 builds before the others; those of further epochs are written by
    `prepare`. Reading raises DataError for a token that the model's vocabulary does not have.
    """

    def __init__(self, config: RunConfig, split: SplitName, samples: int) -> None:
        source, documents = _source(config, split)
        datasets = [Epochs(config, split, Path(prefix), documents) for prefix in prefixes(source)]
        weights = [1.0] if source is None or isinstance(source, str) else [weight for weight, _ in source]
        shares = [weight / sum(weights) for weight in weights]
        if split == "valid":
            samples = min([samples, *(int(d.per_epoch / share) for d, share in zip(datasets, shares, strict=True))])
        self.samples = samples
        self._vocab = config.model.vocab_size
        self._names = ", ".join(prefixes(source))
        self._datasets = datasets
        self._samples: Any = datasets[0] if len(datasets) == 1 else _blend(datasets, shares, samples)
        if split == "valid":
            self.prepare(0, samples)

    def prepare(self, start: int, stop: int) -> None:
        """Have rank 0 write the indices of samples [start, stop), which it must before any rank reads them."""
        stop = min(stop, self.samples)
        if len(self._datasets) == 1:
            self._datasets[0].prepare(start, stop)
            return
        which, numbers = (
            index[start:stop] for index in (self._samples.dataset_index, self._samples.dataset_sample_index)
        )
        for number, dataset in enumerate(self._datasets):
            of_this = numbers[which == number]  # ascending
            if len(of_this):
                dataset.prepare(int(of_this[0]), int(of_this[-1]) + 1)

    def __getitem__(self, index: int) -> Sample:
        record = self._samples[index]
        largest = max(int(record["tokens"].max()), int(record["labels"].max()))
        if largest >= self._vocab:
            what = f"sample {index} of {self._names} has token {largest}; model.vocab_size is {self._vocab}"
            raise DataError(what, mend=f"a vocabulary of at least {largest + 1}, or the data of this model's tokenizer")
        mask = record["loss_mask"]
        return Sample(record["tokens"], record["labels"], None if bool(mask.all()) else mask)


class MockMixture:
    """Uniformly random tokens, for measuring speed: sample i is drawn from (seed, i)."""

    def __init__(self, config: RunConfig, split: SplitName, samples: int) -> None:
        self.samples = samples
        self._seed = (config.train.seed << 1) + (split == "valid")
        self._shape = (config.model.seq_length + 1,)
        self._vocab = config.model.vocab_size

    def __getitem__(self, index: int) -> Sample:
        drawn = np.random.default_rng((self._seed, index)).integers(self._vocab, size=self._shape)
        ids = torch.from_numpy(drawn)
        return Sample(ids[:-1], ids[1:], None)

    def prepare(self, start: int, stop: int) -> None:
        return None


def mixture(config: RunConfig, split: SplitName, samples: int) -> Mixture | MockMixture:
    """The samples of a split, as `[data]` says."""
    return MockMixture(config, split, samples) if config.data.mock else Mixture(config, split, samples)


def _source(config: RunConfig, split: SplitName) -> tuple[str | Blend | None, tuple[float, float]]:
    """Where a split's documents come from, and which fraction of each dataset's documents they are."""
    if config.data.valid is not None:
        return (config.data.train if split == "train" else config.data.valid), (0.0, 1.0)
    train, valid = config.data.split
    bound = train / (train + valid)
    return config.data.train, ((0.0, bound) if split == "train" else (bound, 1.0))


def _blend(datasets: list[Epochs], shares: list[float], samples: int) -> Any:
    """Samples of several datasets: at any point each is at most one ahead of its share, and less than two behind."""
    kind = megatron("blended_dataset").BlendedDataset
    return cached(kind, datasets, shares, samples, config=datasets[0].config)
