"""Token datasets for tests. Every token is unique, and identifies its place in the dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megascale.config.dataset_files import SplitName
from megascale.config.run import RunConfig
from megascale.data.mix.mixture import Mixture
from megascale.data.mix.samples import Sample
from megascale.data.prepare import dataset_writer
from megascale.data.read import indexed_dataset
from megascale.train.run_splits import mixture_spec
from tests.runs import GPT, config_of, settings

VOCABULARY = 60_000
ORIGIN = indexed_dataset.TokenizerInfo("bytes", "bytes", 256, "fixed")
SEQUENCE = 8
PADDING = -1

Source = Path | Sequence[tuple[float, Path]] | None


def write_documents(
    prefix: Path, documents: Iterable[np.ndarray], origin: indexed_dataset.TokenizerInfo, vocab_size: int
) -> indexed_dataset.DatasetInfo:
    """Write a dataset of `documents` (arrays of token ids, eod included)."""
    with dataset_writer.DatasetWriter(prefix, dataset_writer.token_dtype(vocab_size)) as writer:
        try:
            for ids in documents:
                writer.append(ids, np.array([len(ids)], dtype=np.int64), vocab_size)
            return writer.commit(origin, vocab_size)
        except BaseException:
            writer.discard()
            raise


def write_dataset(prefix: Path, lengths: Sequence[int], first: int = 0) -> list[np.ndarray]:
    """Write documents of the given lengths, with tokens `first`, `first` + 1, ... Returns the documents."""
    ends = np.cumsum([first, *lengths])
    documents = [np.arange(start, stop) for start, stop in pairwise(ends)]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    write_documents(prefix, documents, ORIGIN, VOCABULARY)
    return documents


def data_config(folder: Path, train: Source = None, valid: Source = None, **overrides: Any) -> RunConfig:
    """A configuration with datasets, or with mock data. Without `valid`, all documents of `train` are for training,
    unless `data__split` is given. `overrides`: `section__key=value`.
    """
    model = GPT | {"vocab_size": VOCABULARY, "seq_length": SEQUENCE}
    config = config_of(settings(model, folder, **({"data__split": [1.0, 0.0]} | overrides)), folder)
    data = {"train": _plain(train), "valid": _plain(valid), "mock": train is None}
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def _plain(source: Source) -> Any:
    if source is None or isinstance(source, Path):
        return source and str(source)
    return [(weight, str(prefix)) for weight, prefix in source]


def mixture_of(config: RunConfig, split: SplitName = "train", expected: int = 0) -> Mixture:
    """The samples of datasets that a split of a run reads."""
    return Mixture(mixture_spec(config, split), expected)


def positions_of(sample: Sample) -> np.ndarray:
    """The position of each token within its document [s], i64; `PADDING` for padding."""
    assert sample.documents is not None
    found, count = sample.documents, len(sample.tokens)
    inside = found.starts[found.starts < count]
    positions = np.arange(count) - np.repeat(inside, np.diff([*inside, count]))
    positions[found.filled :] = PADDING
    return positions
