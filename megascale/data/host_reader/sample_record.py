"""A sample as bytes of bounded length, as the reader of a host hands it to ranks. No torch.

A record has for each field of Sample a number of its dtype and its length, and then the arrays. Whole numbers take four
bytes: tokens, labels and masks are below 2^31.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np

from megascale.data.mix.mixture import Sample

_STORED = {"i8": "<i4", "i4": "<i4", "f4": "<f4", "u1": "<u1", "b1": "<u1"}
"""The dtype in a record, by the dtype of the field."""

_DTYPES = tuple(_STORED)
_NONE = 255
_FIELDS = [field.name for field in dataclasses.fields(Sample)]
_HEAD = struct.Struct(f"<{2 * len(_FIELDS)}I")


def record_bytes(seq_length: int) -> int:
    """Most bytes of the record of a sample, a multiple of 8."""
    return -(-(_HEAD.size + len(_FIELDS) * 4 * (seq_length + 1)) // 8) * 8


def encode_sample(sample: Sample) -> bytes:
    """Return the record of a sample.

    Raises: ValueError for whole numbers that do not fit four bytes
    """
    facts, parts = [], []
    for name in _FIELDS:
        array: np.ndarray | None = getattr(sample, name)
        if array is None:
            facts += [_NONE, 0]
            continue
        kind = array.dtype.str[1:]
        stored = array.astype(_STORED[kind])
        if kind == "i8" and not np.array_equal(stored, array):
            raise ValueError(f"{name} of a sample has numbers from {array.min()} to {array.max()}")
        facts += [_DTYPES.index(kind), len(array)]
        parts.append(stored.tobytes())
    return b"".join([_HEAD.pack(*facts), *parts])


def decode_sample(record: bytes) -> Sample:
    """Return the sample of a record, in the dtypes that it had."""
    facts, at = _HEAD.unpack_from(record), _HEAD.size
    fields: list[Any] = []
    for code, length in zip(facts[::2], facts[1::2], strict=True):
        if code == _NONE:
            fields.append(None)
            continue
        kind = _DTYPES[code]
        stored = np.frombuffer(record, _STORED[kind], length, at)
        fields.append(stored.astype(kind))
        at += stored.nbytes
    return Sample(*fields)
