"""A teacher's soft labels for the samples of a run: `Teacher` reads them from a file (`config.teacher_file`), which
`write_labels` has written, and `MockTeacher` draws them. No torch.

A record of the file has a digest of the sample's ids, and for each label the ids of the likeliest tokens [s, k], i32,
the likeliest first, and their log-probabilities [s, k], f32.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megascale.config.teacher_file import DIGEST_BYTES, HEADER_BYTES, WRITE_AGAIN_HINT, TeacherHeader, read_header
from megascale.core.errors import DataError
from megascale.core.files import atomic_file


class LabelRows(NamedTuple):
    """The soft labels of a sample: ids [s, k], i32, and log-probabilities [s, k], f32."""

    ids: np.ndarray
    log_probs: np.ndarray


class SoftLabelSource(Protocol):
    """The soft labels of samples, by their number in the run."""

    def rows(self, sample: int, ids: np.ndarray) -> LabelRows:
        """Read the soft labels of a sample with these ids [s + 1]."""


def digest(ids: np.ndarray) -> bytes:
    """Return the digest of a sample's ids [s + 1]."""
    return hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class Teacher:
    """The soft labels in a file, of which the first `top_k` of each label count."""

    path: str
    top_k: int

    @cached_property
    def header(self) -> TeacherHeader:
        return read_header(self.path)

    @cached_property
    def _records(self) -> np.memmap:
        return np.memmap(self.path, record_type(self.header), "r", HEADER_BYTES, self.header.samples)

    def check(self, identities: dict[str, str]) -> None:
        """Check that the file is of the datasets with these identities. Raises: DataError"""
        for prefix, identity in identities.items():
            if (then := self.header.data.get(prefix)) != identity:
                before = f"{then} then, {identity} now" if then else "the teacher did not read it"
                raise DataError(f"{self.path} is of other data than {prefix}: {before}", hint=WRITE_AGAIN_HINT)

    def rows(self, sample: int, ids: np.ndarray) -> LabelRows:
        """Read the soft labels of a sample. Raises: DataError for one that the teacher has not read"""
        if sample >= self.header.samples:
            what = f"{self.path} has {self.header.samples} samples, and none of number {sample}"
            raise DataError(what, hint="a file of more samples, or a smaller train.distill_until_step")
        record = self._records[sample]
        if record["digest"].tobytes() != digest(ids):
            what = f"sample {sample} has other tokens than the sample that the teacher of {self.path} has read"
            raise DataError(what, hint=f"{WRITE_AGAIN_HINT}: the data or their order has changed")
        return LabelRows(*(np.array(record[name][:, : self.top_k]) for name in ("ids", "log_probs")))


@dataclass(frozen=True)
class MockTeacher:
    """Random soft labels, of `top_k` tokens of the vocabulary each."""

    seed: int
    vocab_size: int
    top_k: int

    def rows(self, sample: int, ids: np.ndarray) -> LabelRows:
        """Draw the soft labels of a sample: successive tokens from a drawn one on."""
        drawn = np.random.default_rng((self.seed, sample, self.top_k))
        first = drawn.integers(self.vocab_size, size=(len(ids) - 1, 1))
        tokens = ((first + np.arange(self.top_k)) % self.vocab_size).astype(np.int32)
        return LabelRows(tokens, drawn.normal(size=tokens.shape).astype(np.float32))


def record_type(header: TeacherHeader) -> np.dtype:
    """Return the format of a record."""
    shape = header.seq_length, header.top_k
    return np.dtype([("digest", "u1", DIGEST_BYTES), ("ids", "<i4", shape), ("log_probs", "<f4", shape)])


def write_labels(path: Path, header: TeacherHeader, labels: Iterable[tuple[np.ndarray, LabelRows]]) -> None:
    """Write a file of the ids [s + 1] and the soft labels of each sample. It appears when it is whole.

    Raises: DataError, OSError
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(header.encode())
        record = np.zeros((), record_type(header))
        for ids, rows in labels:
            record["digest"] = np.frombuffer(digest(ids), np.uint8)
            record["ids"], record["log_probs"] = rows
            file.write(record.tobytes())
        file.flush()
        assert os.fstat(file.fileno()).st_size == header.file_bytes, "a record for every sample"
