"""The result of a rule that a configuration breaks, and sizes and values for its hint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megascale.core.errors import Problem


@dataclass(frozen=True)
class Finding:
    """A broken rule: the key to change, what is wrong, and a hint."""

    key: str
    message: str
    hint: str

    def __str__(self) -> str:
        return f"{self.key} {self.message}  -> {self.hint}"

    def problem(self, where: str) -> Problem:
        """Return the finding as a problem at a place."""
        return Problem(where, self.key, self.message, self.hint)


def divisors(n: int, limit: int | None = None) -> list[int]:
    """Divisors of n up to `limit`, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [d for d in sorted({*small, *(n // d for d in small)}) if d <= (limit or n)]


def join_values(values: Sequence[int]) -> str:
    """List values with commas, of many the first and the last."""
    shown = values if len(values) <= 12 else [*values[:6], "...", *values[-5:]]
    return ", ".join(map(str, shown))
