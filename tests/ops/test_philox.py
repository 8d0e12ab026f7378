"""Philox gives the published numbers, and bytes of a matrix that no layout changes."""

from __future__ import annotations

import pytest
import torch

from megascale.ops.philox import block_bytes, philox

FULL = 0xFFFFFFFF

PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), "6627E8D5 E169C58D BC57AC4C 9B00DBD8"),
    ((FULL,) * 4, (FULL, FULL), "408F276D 41C83B0E A20BC7C6 6D5451FD"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        "D16CFE09 94FDCCEB 5001E420 24126EA1",
    ),
    ((5, 0, 7, 0), (42, 0), "0D09DEB5 EAAC8166 698984A0 6C98929F"),
]  # fmt: skip
"""Counters, keys and words: three from Random123's own tests, and a block of a matrix."""


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_published_numbers(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    a, b, c, d = (torch.tensor([word]) for word in counter)
    assert " ".join(f"{word.item():08X}" for word in philox((a, b, c, d), key)) == words


def test_bytes_of_a_block_are_words_low_byte_first() -> None:
    (found,) = block_bytes((42, 0), torch.tensor([7]), torch.tensor([5]))
    assert bytes(found.tolist()).hex(" ", 4) == "b5de090d 6681acea a0848969 9f92986c"


def test_bytes_depend_on_global_places_alone() -> None:
    rows, blocks = torch.arange(1 << 33, (1 << 33) + 24), torch.arange(100, 106)
    whole = block_bytes((1, 2), rows, blocks)
    assert whole.shape == (24, 96)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block_bytes((1, 2), rows[order], blocks[2:4]), whole[order, 32:64])
    for other in (block_bytes((1, 3), rows, blocks), block_bytes((1, 2), rows % (1 << 32), blocks)):
        assert (other == whole).float().mean() < 0.02  # of independent bytes, 1 / 256


def test_bytes_are_uniform() -> None:
    found = block_bytes((3, 4), torch.arange(512), torch.arange(64)).flatten().long()
    counts = torch.bincount(found, minlength=256).double()
    expected = found.numel() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 330  # chi squared of 255 degrees: beyond it once in a thousand
