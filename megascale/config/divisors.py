"""Divisors of a size, which hints offer where a size does not divide."""

from __future__ import annotations

import math
from collections.abc import Sequence


def divisors(n: int, limit: int | None = None) -> list[int]:
    """Divisors of n up to `limit`, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [d for d in sorted({*small, *(n // d for d in small)}) if d <= (limit or n)]


def join_values(values: Sequence[int]) -> str:
    """List values with commas, of many the first and the last."""
    shown = values if len(values) <= 12 else [*values[:6], "...", *values[-5:]]
    return ", ".join(map(str, shown))
