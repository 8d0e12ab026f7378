"""A file that is formed as it is written, and the checksum of what is joined."""

from __future__ import annotations

import zlib
from pathlib import Path

import hypothesis.strategies as st
import torch
from hypothesis import given
from safetensors.torch import load_file

from megascale.checkpoint import crc
from megascale.checkpoint.shard import CHUNK, SUMS, Entry, Shard, chunk_of


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_the_checksum_of_two_is_that_of_both(first: bytes, second: bytes) -> None:
    assert crc.joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.integers(0, 1 << 50))
def test_chunks_are_few_and_small(size: int) -> None:
    chunk = chunk_of(size)
    assert chunk & (chunk - 1) == 0 and chunk >= CHUNK and (chunk == CHUNK or SUMS // 2 <= size / chunk <= SUMS)


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5, dtype=torch.bfloat16), "c": torch.zeros(0, 3)}
    formats = {"a": "F32", "b": "BF16", "c": "F32"}
    made = Shard(
        [
            Entry(name, formats[name], list(t.shape), t.view(-1).view(torch.uint8).numpy().data)
            for name, t in tensors.items()
        ],
        chunk=16,
    )
    data = b"".join(bytes(part) for part in made.parts())
    (tmp_path / "file").write_bytes(data)
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert made.size == len(data) and made.crc32 == zlib.crc32(data)
    start, sums = made.boxes["a"]
    assert sums == [zlib.crc32(data[at : at + 16]) for at in range(start, start + 48, 16)]
    assert made.boxes["b"][1] == [zlib.crc32(data[made.boxes["b"][0] :][:10])] and made.boxes["c"][1] == []
