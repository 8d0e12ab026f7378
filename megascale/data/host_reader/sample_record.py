"""A sample as bytes of bounded length, as the reader of a host hands it to ranks. No torch.

A record has for each array of a sample a number of its dtype and its length, then the tokens before padding, or -1
without documents, and then the arrays. Whole numbers take four bytes: tokens, masks and places are below 2^31.
"""

from __future__ import annotations

import struct

import numpy as np

from megascale.data.mix.samples import DocumentStarts, Sample

_STORED = {"i8": "<i4", "i4": "<i4", "f4": "<f4", "u1": "<u1", "b1": "<u1"}
"""The dtype in a record, by the dtype of the field."""

_DTYPES = tuple(_STORED)
_NONE = 255
_ARRAYS = 3  # arrays of a sample: ids, mask, starts of documents

_HEAD = struct.Struct(f"<{2 * _ARRAYS}Ii")


def record_bytes(seq_length: int) -> int:
    """Most bytes of the record of a sample, a multiple of 8."""
    return -(-(_HEAD.size + _ARRAYS * 4 * (seq_length + 1)) // 8) * 8


def encode_sample(sample: Sample) -> bytes:
    """Return the record of a sample. Raises: ValueError for whole numbers that do not fit four bytes"""
    facts, parts, documents = [], [], sample.documents
    for array in (sample.ids, sample.mask, None if documents is None else documents.starts):
        if array is None:
            facts += [_NONE, 0]
            continue
        kind = array.dtype.str[1:]
        stored = array.astype(_STORED[kind])
        if kind == "i8" and not np.array_equal(stored, array):
            raise ValueError(f"a sample has numbers from {array.min()} to {array.max()}")
        facts += [_DTYPES.index(kind), len(array)]
        parts.append(stored.tobytes())
    return b"".join([_HEAD.pack(*facts, -1 if documents is None else documents.filled), *parts])


def decode_sample(record: bytes) -> Sample:
    """Return the sample of a record, in the dtypes that it had."""
    *facts, filled = _HEAD.unpack_from(record)
    at, arrays = _HEAD.size, list[np.ndarray | None]()
    for code, length in zip(facts[::2], facts[1::2], strict=True):
        if code == _NONE:
            arrays.append(None)
            continue
        stored = np.frombuffer(record, _STORED[_DTYPES[code]], length, at)
        arrays.append(stored.astype(_DTYPES[code]))
        at += stored.nbytes
    ids, mask, starts = arrays
    assert ids is not None, "every sample has ids"
    return Sample(ids, mask, None if starts is None else DocumentStarts(starts, filled, len(ids) - 1))
