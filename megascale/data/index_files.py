"""Index files of megatron-core's datasets, opened without pickles and checked before a dataset reads them.

megatron-core loads them with `allow_pickle=True`, which runs code that a file names. Here a dataset is constructed
without its indices, and is given arrays that are numbers of the expected dtype, shape, size and range.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class _IndexKind:
    """Dtypes and dimensions of an index."""

    dtypes: tuple[type[np.generic], ...]
    ndim: int = 1


_KINDS = {
    "document_index": _IndexKind((np.int32,)),
    "sample_index": _IndexKind((np.int32, np.int64), ndim=2),
    "shuffle_index": _IndexKind((np.uint32, np.int64)),
    "dataset_index": _IndexKind((np.int16,)),
    "dataset_sample_index": _IndexKind((np.int64,)),
}
"""Indices of GPTDataset (the first three) and of BlendedDataset."""


def load_indices(dataset: Any, *, check_ranges: bool) -> None:
    """Load the indices of `dataset`, which has the paths alone (`defer_npy_index_mmap`). `check_ranges` reads all
    entries once.

    Raises: OSError; ValueError for a file that is not an index, is cut short, or has entries out of range.
    """
    names = [name for name in _KINDS if hasattr(dataset, f"path_to_{name}")]
    indices = {name: _open_array(Path(getattr(dataset, f"path_to_{name}")), _KINDS[name]) for name in names}
    if "sample_index" in indices:
        _check_samples(dataset, indices, check_ranges)
    else:
        _check_blend(dataset, indices, check_ranges)
    for name, index in indices.items():
        setattr(dataset, name, index)


def _open_array(path: Path, kind: _IndexKind) -> np.memmap:
    """Memory-map an array file. Python objects, which would be unpickled, are refused."""
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError(f"{path.name} is not a regular file")
    try:
        array = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OverflowError, MemoryError, SyntaxError, TypeError) as error:
        raise ValueError(f"{path.name} is no array of numbers: {error}".replace("\n", " ")) from None
    if not isinstance(array, np.memmap):
        raise ValueError(f"{path.name} is an archive, not an array")
    if array.dtype not in [np.dtype(dtype) for dtype in kind.dtypes]:
        expected = " or ".join(np.dtype(dtype).name for dtype in kind.dtypes)
        raise ValueError(f"{path.name} has dtype {array.dtype}, not {expected}")
    if array.ndim != kind.ndim or not array.flags.c_contiguous:
        raise ValueError(f"{path.name} has shape {array.shape}, not {kind.ndim} dimensions in row-major order")
    if array.offset + array.nbytes != facts.st_size:
        raise ValueError(f"{path.name} has {facts.st_size} bytes, its header says {array.offset + array.nbytes}")
    return array


def _check_samples(dataset: Any, indices: Mapping[str, np.ndarray], check_ranges: bool) -> None:
    """Check the indices of a GPTDataset against one another: document ids [d], (first document, first token) of each
    sample [n + 1, 2], and the order of samples [n].
    """
    documents, samples, order = (indices[name] for name in ("document_index", "sample_index", "shuffle_index"))
    if samples.shape[1] != 2 or not 0 < len(order) < len(samples) or len(documents) != len(dataset.indices):
        raise ValueError(
            f"{len(documents)} documents, {samples.shape} bounds of samples and {len(order)} samples do not belong to "
            f"a dataset of {len(dataset.indices)} documents"
        )
    if check_ranges:
        longest = int(dataset.dataset.sequence_lengths.max())
        _check_range("document_index", documents, int(dataset.indices.min()), int(dataset.indices.max()) + 1)
        _check_range("sample_index", samples[:, 0], 0, len(documents))
        _check_range("sample_index", samples[:, 1], 0, longest + 1)
        _check_range("shuffle_index", order, 0, len(samples) - 1)


def _check_blend(dataset: Any, indices: Mapping[str, np.ndarray], check_ranges: bool) -> None:
    """Check the indices of a BlendedDataset of n samples: the dataset of each sample [n], and its sample there [n]."""
    datasets, samples = indices["dataset_index"], indices["dataset_sample_index"]
    if not len(datasets) == len(samples) == dataset.size:
        raise ValueError(f"{len(datasets)} datasets and {len(samples)} samples for a blend of {dataset.size}")
    if check_ranges and dataset.size:
        _check_range("dataset_index", datasets, 0, len(dataset.datasets))
        _check_range("dataset_sample_index", samples, 0, dataset.size)


def _check_range(name: str, values: np.ndarray, start: int, stop: int) -> None:
    smallest, largest = int(values.min()), int(values.max())
    if smallest < start or largest >= stop:
        raise ValueError(f"the {name} has entries from {smallest} to {largest}; {start} to {stop - 1} are possible")
