"""Token datasets for tests, in which every token is unique: a sample shows where it was cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megascale.config.run import RunConfig
from megascale.data import indexed
from tests.runs import GPT, config_of, settings

VOCABULARY = 60_000
ORIGIN = indexed.Origin("bytes", "bytes", 256)
SEQUENCE = 8

Source = Path | Sequence[tuple[float, Path]] | None


def write_dataset(prefix: Path, lengths: Sequence[int], first: int = 0) -> list[np.ndarray]:
    """A dataset of documents with these lengths; its tokens count up from `first`. Returns the documents."""
    ends = np.cumsum([first, *lengths])
    documents = [np.arange(start, stop) for start, stop in pairwise(ends)]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    indexed.write(prefix, documents, ORIGIN, VOCABULARY)
    return documents


def data_config(folder: Path, train: Source = None, valid: Source = None, **overrides: Any) -> RunConfig:
    """A run on datasets, or on mock data; without `valid`, on all of `train`'s documents unless `data__split` says
    otherwise. `overrides`: `section__key=value`.
    """
    model = GPT | {"vocab_size": VOCABULARY, "seq_length": SEQUENCE}
    config = config_of(settings(model, folder, **({"data__split": [1.0, 0.0]} | overrides)), folder)
    data = {"train": _plain(train), "valid": _plain(valid), "mock": train is None}
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def _plain(source: Source) -> Any:
    if source is None or isinstance(source, Path):
        return source and str(source)
    return [(weight, str(prefix)) for weight, prefix in source]
