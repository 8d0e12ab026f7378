"""A safetensors file as a stream of bytes, and the CRC-32 of joined bytes."""

from __future__ import annotations

import zlib
from pathlib import Path

import hypothesis.strategies as st
import torch
from hypothesis import given
from safetensors.torch import load_file

from megascale.checkpoint.format.safetensors_file import (
    MAX_CHECKSUMS,
    MIN_CHECKSUM_BLOCK_BYTES,
    SafetensorsFile,
    checksum_block_bytes,
    crc32_combine,
)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_crc32_of_joined_bytes(first: bytes, second: bytes) -> None:
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.integers(0, 1 << 50))
def test_chunks_are_few_and_small(size: int) -> None:
    chunk = checksum_block_bytes(size)
    assert (
        chunk & (chunk - 1) == 0
        and chunk >= MIN_CHECKSUM_BLOCK_BYTES
        and (chunk == MIN_CHECKSUM_BLOCK_BYTES or MAX_CHECKSUMS // 2 <= size / chunk <= MAX_CHECKSUMS)
    )


def test_safetensors_loads_the_file(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5, dtype=torch.bfloat16), "c": torch.zeros(0, 3)}
    dtypes = {"a": "F32", "b": "BF16", "c": "F32"}
    file = SafetensorsFile(
        "file",
        [(name, dtypes[name], list(t.shape), t.view(-1).view(torch.uint8).numpy().data) for name, t in tensors.items()],
        checksum_block_bytes=16,
    )
    data = b"".join(bytes(part) for part in file.iter_bytes())
    (tmp_path / "file").write_bytes(data)
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert file.size == len(data) and file.crc32 == zlib.crc32(data)
    name, start, sums = file.locations["a"].values()
    assert name == "file" and sums == [zlib.crc32(data[at : at + 16]) for at in range(start, start + 48, 16)]
    b, c = file.locations["b"], file.locations["c"]
    assert b["sums"] == [zlib.crc32(data[b["start"] :][:10])] and c["sums"] == []
