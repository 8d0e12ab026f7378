"""Compressed pseudo-gradients: what is sent, in how many bytes, and what is kept."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megascale.config.sites import CHUNK, SitesConfig
from megascale.optim.compression import Compression, pack_bits, unpack_bits

LENGTHS = [3 * CHUNK, CHUNK + 77, 5, 1, 2 * CHUNK - 1]
SHARES, BITS = (1.0, 0.25, 64 / CHUNK), (32, 8, 2)
CASES = [*itertools.product(SHARES, BITS)]


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers of many magnitudes, with zeros among them."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    found *= torch.logspace(-6, 2, len(found), dtype=torch.float64)
    found[torch.rand(len(found), generator=generator) < 0.1] = 0
    return found.to(dtype)


def chunks(flat: Tensor) -> list[Tensor]:
    return [chunk for part in flat.split(LENGTHS) for chunk in part.split(CHUNK)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_elements_in_full_are_sent_bit_for_bit(dtype: torch.dtype) -> None:
    sent = values(dtype)
    payload = Compression().compress(sent, LENGTHS)
    assert payload.nbytes == sent.nbytes
    assert torch.equal(Compression().decompress(payload, LENGTHS, dtype), sent)


@pytest.mark.parametrize(("share", "bits"), CASES)
def test_the_largest_elements_of_each_chunk_are_sent(share: float, bits: int) -> None:
    compression, given = Compression(share, bits), values()
    restored = compression.decompress(compression.compress(given, LENGTHS), LENGTHS, given.dtype)
    for before, after in zip(chunks(given), chunks(restored), strict=True):
        kept = max(1, -(-len(before) * share // 1))
        sent = after != 0
        assert sent.sum() <= kept
        missing = before[~sent].abs().max() if not sent.all() else torch.zeros(())
        if bits == 32:
            assert torch.equal(after[sent], before[sent]) and missing <= before[sent].abs().min()
        elif bits == 8:
            assert ((after - before)[sent].abs() <= before.abs().max() / 127 / 2 * 1.0001).all()
        else:
            given_too = sent & (before != 0)  # a zero has the smaller level, and leaves its negative as a residual
            assert torch.equal(after[given_too].sign(), before[given_too].sign())
            assert len(after[sent].abs().unique()) <= 2


@pytest.mark.parametrize("share", SHARES)
def test_two_bits_keep_the_sum_of_magnitudes(share: float) -> None:
    """The levels are means, so that what a chunk sends is as much as what it stands for."""
    given = values(torch.float64)
    exact, coarse = (Compression(share, bits) for bits in (32, 2))
    whole, restored = (each.decompress(each.compress(given, LENGTHS), LENGTHS, given.dtype) for each in (exact, coarse))
    for before, after in zip(chunks(whole), chunks(restored), strict=True):
        torch.testing.assert_close(after.abs().sum(), before.abs().sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("share", "bits"), CASES)
def test_a_payload_has_the_planned_bytes(share: float, bits: int) -> None:
    settings = SitesConfig(top_k=share, bits=bits)
    elements = 64 * CHUNK
    assert len(Compression(share, bits).compress(torch.randn(elements), [elements])) == settings.sent_bytes(elements, 4)


def test_a_parameter_alone_is_sent_as_beside_others() -> None:
    """Ranks with the same parameter send the same of it, whatever else their shards have."""
    compression = Compression(0.05, 2)
    first, second = torch.randn(CHUNK + 100), torch.randn(300)
    alone = compression.decompress(compression.compress(first, [len(first)]), [len(first)], first.dtype)
    lengths = [len(second), len(first)]
    both = compression.decompress(compression.compress(torch.cat([second, first]), lengths), lengths, first.dtype)
    assert torch.equal(both[len(second) :], alone)


@pytest.mark.parametrize("bits", [1, 2, 7, 8, 12])
def test_packed_numbers_come_back(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (1001,))
    packed = pack_bits(codes, bits)
    assert len(packed) == -(-1001 * bits // 8)
    assert torch.equal(unpack_bits(packed, bits, 1001), codes)
