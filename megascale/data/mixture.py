"""Samples from megatron-core's datasets, blended by weight, in an order that is a function of the seed and the sample's
number alone.

megatron-core shuffles all epochs of a run together, so that the order changes with the length of the run. Here every
epoch is a dataset of its own, shuffled with its own seed: a run that is prolonged goes on where it was.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megascale.config.run import RunConfig, prefixes
from megascale.config.train import Blend
from megascale.core.errors import DataError
from megascale.data import indexed

SplitName = Literal["train", "valid"]


@dataclass(frozen=True)
class Sample:
    """tokens and labels [s], i64; mask [s] in {0, 1}, or None if every label counts."""

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor | None


class Mixture:
    """`samples` samples of one split; for validation as many as there are without repetition, if that is fewer.

    Building writes the indices that are cached, so one rank builds before the others.
    """

    def __init__(self, config: RunConfig, split: SplitName, samples: int) -> None:
        source, documents = _source(config, split)
        datasets = [_Epochs(config, split, Path(prefix), documents) for prefix in prefixes(source)]
        weights = [1.0] if source is None or isinstance(source, str) else [weight for weight, _ in source]
        shares = [weight / sum(weights) for weight in weights]
        if split == "valid":
            samples = min([samples, *(int(d.per_epoch / share) for d, share in zip(datasets, shares, strict=True))])
        self.samples = samples
        for dataset, share in zip(datasets, shares, strict=True):
            dataset.prepare(math.ceil(samples * share) + len(datasets))  # the blend keeps each within one of its share
        self._blend = datasets[0] if len(datasets) == 1 else _blend(datasets, shares, samples)

    def __getitem__(self, index: int) -> Sample:
        record = self._blend[index]
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


def _cache(config: RunConfig) -> Path:
    """Where megatron-core keeps its indices."""
    if config.data.cache:
        return Path(config.data.cache)
    return Path(prefixes(config.data.train)[0]).parent / "cache"


@dataclass(frozen=True)
class _Tokenizer:
    """What megatron-core's datasets ask of a tokenizer. `unique_identifiers` enters the names of cached indices: with
    it they are not mistaken for those of another dataset that was prepared under the same name.
    """

    eod: int
    vocab_size: int | None
    unique_identifiers: Mapping[str, Any]


def _megatron(module: str) -> Any:
    """A module of megatron-core's datasets: imported when data is first read, since it takes seconds and brings torch
    extensions with it, and without its warnings about those that this machine lacks.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.datasets.{module}")


def _blend(datasets: list[_Epochs], shares: list[float], samples: int) -> Any:
    return _megatron("blended_dataset").BlendedDataset(datasets, shares, samples, datasets[0].config)


class _Epochs:
    """One dataset, repeated as often as needed, each epoch in an order of its own. It stands in for a dataset of
    megatron-core in a blend, hence `index_split` and `unique_identifiers`.
    """

    def __init__(self, config: RunConfig, split: SplitName, prefix: Path, documents: tuple[float, float]) -> None:
        reader, made = indexed.read(prefix), indexed.describe(prefix)
        first, last = (round(len(reader) * edge) for edge in documents)
        tokens = int(reader.lengths[first:last].sum())
        if tokens <= config.model.seq_length:
            raise DataError(
                f"{prefix}: {tokens} tokens to {'train' if split == 'train' else 'validate'} on, "
                f"fewer than one sample of {config.model.seq_length} + 1",
                mend="more data, another data.split, or a shorter model.seq_length",
            )
        stat = prefix.with_name(prefix.name + ".idx").stat()
        identity = {"bytes": stat.st_size, "changed": stat.st_mtime_ns}
        self._tokenizer = _Tokenizer(made.tokenizer["eod"] if made else 0, None, identity)
        self._run = config
        self._prefix = prefix
        self.index_split = _megatron("utils").Split[split]
        self._indices = np.arange(first, last, dtype=np.int32)
        self.config = self._settings(0)
        self._low_level = _megatron("gpt_dataset").GPTDataset.build_low_level_dataset(str(prefix), self.config)
        self._epochs: dict[int, Any] = {}
        self.per_epoch = len(self._epoch(0))
        self._prepared = 1
        self.unique_identifiers = {"prefix": str(prefix), "seed": config.train.seed, **identity}

    def __len__(self) -> int:
        """Samples of the epochs that were prepared."""
        return self._prepared * self.per_epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        epoch, within = divmod(int(index), self.per_epoch)
        return self._epoch(epoch)[within]

    def prepare(self, samples: int) -> None:
        """Build the indices of as many epochs as `samples` samples need."""
        self._prepared = math.ceil(samples / self.per_epoch)
        for epoch in range(self._prepared):
            self._epoch(epoch)

    def _epoch(self, epoch: int) -> Any:
        if epoch not in self._epochs:
            self._epochs[epoch] = _megatron("gpt_dataset").GPTDataset(
                self._low_level, str(self._prefix), self._indices, None, self.index_split, self._settings(epoch)
            )
        return self._epochs[epoch]

    def _settings(self, epoch: int) -> Any:
        return _megatron("gpt_dataset").GPTDatasetConfig(
            random_seed=(self._run.train.seed + epoch) % 2**32,
            sequence_length=self._run.model.seq_length,
            blend=([str(self._prefix)], None),
            split="1,0,0",
            path_to_cache=str(_cache(self._run)),
            tokenizer=self._tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
