"""Compression of pseudo-gradients: the largest elements of each chunk, in few bits (SparseLoCo, Sarfi et al. 2025,
arXiv:2508.15706).

    chunk, 4096 elements  ->  top-k by magnitude  ->  place, 12 bits | sign and level, 2 bits | two levels, fp32

A chunk never crosses the border of a parameter: ranks with the same parameter choose the same elements of it, whatever
stands beside it. Quantizers, by bits of a value:

    32  the value as it is
    8   a multiple of 1/127 of the chunk's largest magnitude
    2   sign, and one of two levels: the mean of the chunk's magnitudes above their mean, and of those below
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.config.sites import CHUNK, INDEX_BITS, LEVEL_BYTES


@dataclass(frozen=True)
class Compression:
    """The share `top_k` of a chunk's elements that is sent, at least one, and the `bits` of each."""

    top_k: float = 1.0
    bits: int = 32

    def compress(self, values: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the payload [bytes], u8, of `values` [n], which are parameters of `lengths` end to end."""
        payload: list[Tensor] = []
        for chunks in _chunks(values, lengths):
            kept = math.ceil(self.top_k * chunks.shape[1])
            sent = chunks
            if kept < chunks.shape[1]:
                places = chunks.abs().topk(kept, sorted=False).indices.sort().values
                payload.append(pack_bits(places.view(-1), INDEX_BITS))
                sent = chunks.gather(1, places)
            payload += self._quantize(sent)
        return torch.cat(payload) if payload else values.new_empty(0, dtype=torch.uint8)

    def decompress(self, payload: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the values [n] that a payload stands for, zero where none was sent."""
        values = torch.zeros(sum(lengths), dtype=dtype, device=payload.device)
        value_bits = 8 * dtype.itemsize if self.bits == 32 else self.bits
        for chunks in _chunks(values, lengths):
            rows, kept = len(chunks), math.ceil(self.top_k * chunks.shape[1])
            index_bits = INDEX_BITS if kept < chunks.shape[1] else 0
            packed = [-(-rows * kept * bits // 8) for bits in (index_bits, value_bits)]
            sizes = packed[0], LEVEL_BYTES[self.bits] * rows, packed[1]
            *parts, payload = payload.split([*sizes, len(payload) - sum(sizes)])
            places, levels, codes = (part.clone() for part in parts)  # aligned, to be viewed as numbers
            restored = self._restore(levels.view(torch.float32), codes, (rows, kept), dtype)
            if index_bits:
                chunks.scatter_(1, unpack_bits(places, INDEX_BITS, rows * kept).view(rows, kept), restored)
            else:
                chunks.copy_(restored)
        return values

    def _quantize(self, kept: Tensor) -> list[Tensor]:
        """Return the bytes of the sent values [rows, k] of chunks."""
        magnitude = kept.abs()
        if self.bits == 32:
            return [_bytes(kept)]
        if self.bits == 8:
            scale = (magnitude.amax(1, keepdim=True) / 127).float()
            codes = (kept / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
            return [_bytes(scale), _bytes(codes.to(torch.int8))]
        above = magnitude > magnitude.mean(1, keepdim=True)
        high = (magnitude * above).sum(1) / above.sum(1).clamp(min=1)
        low = (magnitude * ~above).sum(1) / (~above).sum(1).clamp(min=1)
        codes = (kept < 0).long() + 2 * above
        return [_bytes(torch.stack([low, high], 1).float()), pack_bits(codes.view(-1), 2)]

    def _restore(self, levels: Tensor, codes: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the values [rows, k] of which `_quantize` has made levels and codes."""
        if self.bits == 32:
            return codes.view(dtype).view(shape)
        levels = levels.to(dtype).view(shape[0], -1)
        if self.bits == 8:
            return codes.view(torch.int8).view(shape).to(dtype) * levels
        codes = unpack_bits(codes, 2, math.prod(shape)).view(shape)
        return levels.gather(1, codes >> 1) * (1 - 2 * (codes & 1))


def _chunks(values: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
    """Yield views of runs of equal chunks, [chunks, elements]."""
    for parameter in values.split([*lengths]):
        whole = len(parameter) // CHUNK * CHUNK
        if whole:
            yield parameter[:whole].view(-1, CHUNK)
        if whole < len(parameter):
            yield parameter[None, whole:]


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack whole numbers [n] of `bits` bits each into bytes, u8, lowest bits first."""
    places = torch.arange(bits, device=codes.device)
    flat = ((codes[:, None] >> places) & 1).view(-1)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return (flat << torch.arange(8, device=codes.device)).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the `count` numbers [count], i64, that `pack_bits` has packed."""
    flat = ((packed[:, None].long() >> torch.arange(8, device=packed.device)) & 1).view(-1)
    places = torch.arange(bits, device=packed.device)
    return (flat[: count * bits].view(count, bits) << places).sum(1)
