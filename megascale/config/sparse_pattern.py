"""Sparse attention by head: the blocks of keys that a head sees (S2-Attention, Lin et al. 2024).

Blocks are counted from the start of a document. A query in block c sees, up to its own position,

    the keys of blocks b with c - b < local_blocks, and of earlier ones those with (b + h) mod stride = 0

in head h, counted over all ranks: the `stride` offsets of the heads together show every key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

MOST = 2**30
"""The largest number in a pattern: the tokens of the longest sequence."""

LEAST = {"local_blocks": 1, "stride": 2, "block": 1}
"""The least number of each key."""

REQUIRED = ("local_blocks", "stride")


@dataclass(frozen=True)
class SparsePattern:
    """A pattern: `local_blocks` with the query's own, `stride` of earlier blocks, `block` in tokens."""

    local_blocks: int
    stride: int
    block: int = 64

    def __str__(self) -> str:
        return "sparse"

    def count_scores(self, tokens: int) -> tuple[float, float]:
        """Count the scores of a document, the mean over heads: with every query's keys those of the last one, and as
        the mask leaves them, a query's own key by half as in n^2 / 2 of full attention.
        """
        near = min(tokens, self.local_blocks * self.block)
        whole, rest = divmod(tokens, self.block)
        beyond = whole - self.local_blocks  # blocks of which the last whole one has one more behind its local ones
        far = max(0, beyond) * (beyond + 1) // 2 * self.block**2 + rest * self.block * max(0, beyond + 1)
        hidden = far * (1 - 1 / self.stride)
        return tokens * (near + (tokens - near) / self.stride), tokens**2 / 2 - hidden


Reach = int | SparsePattern
"""The keys that a query sees: a window of that many up to its own, or a sparse pattern."""


def check_sparse_pattern(table: dict[str, Any]) -> dict[str, Any]:
    """Check the keys of a table. Raises: PydanticCustomError that lists the mistakes"""
    mistakes = [f"needs {name}" for name in REQUIRED if name not in table]
    mistakes += [f"has no {name}, only {', '.join(LEAST)}" for name in table if name not in LEAST]
    for name, value in table.items():
        if name in LEAST and (type(value) is not int or not LEAST[name] <= value <= MOST):
            mistakes.append(f"{name} should be a whole number from {LEAST[name]}, not {value!r}")
    if mistakes:
        context = {"message": "; ".join(mistakes), "hint": "for example {local_blocks = 4, stride = 8, block = 64}"}
        raise PydanticCustomError("table", "{message}", context)
    return table
