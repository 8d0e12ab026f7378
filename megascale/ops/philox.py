"""Philox4x32-10, random bits as a function of a counter and a key (Salmon, Moraes, Dror and Shaw 2011).

The bits depend on nothing else: they are equal on every device and in every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # added to the key after a round
WORD = 0xFFFFFFFF  # the bits of a u32


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four words for each counter. All words are u32 in i64; the counter's broadcast."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(ROUNDS):
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # wraps, and keeps the 64 bits of u32 times u32
        a, b, c, d = (q >> 32) & WORD ^ b ^ low, q & WORD, (p >> 32) & WORD ^ d ^ high, p & WORD
        low, high = (low + KEY_STEPS[0]) & WORD, (high + KEY_STEPS[1]) & WORD
    return a, b, c, d


def block_bytes(key: tuple[int, int], rows: Tensor, blocks: Tensor) -> Tensor:
    """Return a random byte for each element of a matrix in blocks of 16 along k, u8 [m, k].

    `rows`, i64 [m], and `blocks`, i64 [k / 16]: global indices. The bytes of a block are the words of the counter
    (block, 0, row), low bytes first.
    """
    row, block = rows.unsqueeze(1), blocks.unsqueeze(0)
    words = philox((block, torch.zeros_like(block), row & WORD, row >> 32), key)
    return torch.stack(words, -1).view(torch.uint8).unflatten(-1, (4, 8))[..., :4].flatten(1)
