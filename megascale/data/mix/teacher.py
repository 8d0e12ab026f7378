"""A teacher's soft labels for the samples of a run: of a file (`config.teacher_file`), or random ones. No torch.

A record of the file has a digest of the sample's ids, and for each label the ids of the likeliest tokens [s, k], i32,
the likeliest first, and their log-probabilities [s, k], f32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from megascale.config.teacher_file import DIGEST_BYTES, WRITE_AGAIN_HINT, TeacherHeader, read_header
from megascale.core.errors import DataError
from megascale.core.files import atomic_file

LabelRows = tuple[np.ndarray, np.ndarray]
"""The soft labels of a sample: ids [s, k], i32, and log-probabilities [s, k], f32."""

SoftLabelSource = Callable[[int, np.ndarray], LabelRows | None]
"""The soft labels of samples that have any, by the number of a sample in the run and its ids [s + 1]."""


def soft_labels(path: str | None, needed: TeacherHeader) -> SoftLabelSource:
    """Return a reader of the soft labels that a run needs, in a file that may have more; None: random ones."""
    read = partial(mock_labels, needed) if path is None else open_labels(path, needed.top_k)
    return lambda sample, ids: read(sample, ids) if sample < needed.samples else None


def digest(ids: np.ndarray) -> bytes:
    """Return the digest of a sample's ids [s + 1]."""
    return hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=DIGEST_BYTES).digest()


def record_type(header: TeacherHeader) -> np.dtype:
    """Return the format of a record."""
    shape = header.seq_length, header.top_k
    return np.dtype([("digest", f"V{DIGEST_BYTES}"), ("ids", "<i4", shape), ("log_probs", "<f4", shape)])


def open_labels(path: str, top_k: int) -> Callable[[int, np.ndarray], LabelRows]:
    """Open the soft labels in a file, of which the first `top_k` of each label count. Raises: DataError, also when a
    sample with other tokens than the teacher has read is read
    """
    header = read_header(path)
    records = np.memmap(path, record_type(header), "r", len(header.line), header.samples)

    def rows(sample: int, ids: np.ndarray) -> LabelRows:
        if records[sample]["digest"].tobytes() != digest(ids):
            what = f"sample {sample} has other tokens than the sample that the teacher of {path} has read"
            raise DataError(what, hint=f"{WRITE_AGAIN_HINT}: the data or their order has changed")
        return records[sample]["ids"][:, :top_k], records[sample]["log_probs"][:, :top_k]

    return rows


def mock_labels(header: TeacherHeader, sample: int, ids: np.ndarray) -> LabelRows:
    """Draw soft labels: successive tokens of the vocabulary from a drawn one on."""
    drawn = np.random.default_rng((header.seed, sample))
    first = drawn.integers(header.vocab_size, size=(len(ids) - 1, 1))
    tokens = ((first + np.arange(header.top_k)) % header.vocab_size).astype(np.int32)
    return tokens, drawn.normal(size=tokens.shape).astype(np.float32)


def write_labels(path: Path, header: TeacherHeader, labels: Iterable[tuple[np.ndarray, LabelRows]]) -> None:
    """Write a file of the ids [s + 1] and soft labels of each sample. It appears when it is whole. Raises: OSError"""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(header.line)
        for ids, rows in labels:
            file.write(np.array((digest(ids), *rows), record_type(header)).tobytes())
