"""Seconds of what a device computes: GEMMs by their shape, attention, and passes over memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megascale.simulate.profiles import Hardware, Measured, Reached, Stack

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 64, 0.55))
"""Rows, columns and relative speed of a multiprocessor's tiles: a small tile reads more operand bytes for each FLOP."""

UNKNOWN = Reached(forward=0.35, backward=0.35)
"""Shares of the peak that attention reaches on a device whose profile has none."""

RAMP = 192
"""Terms of the inner dimension that fill and drain a tile's pipeline: k terms take as long as k + RAMP."""

MASK = 1
"""Bytes of a score's dropout mask, as in Megatron-LM. In a forward softmax and dropout read and write the score; in a
backward both read and write its gradient, and softmax reads the score.
"""

FLASH_BACKWARD = 2.5
"""GEMMs in the backward of fused attention over those of its forward: it recomputes the scores (Dao 2023)."""


@dataclass(frozen=True)
class Kernels:
    """The times of one device with one stack. `number_format`: dtype of GEMMs outside FP8; `bytes`: of an element."""

    hardware: Hardware
    stack: Stack
    number_format: str
    bytes: int

    @property
    def measured(self) -> Measured | None:
        """The measured rates of a processor; None for an accelerator."""
        return self.hardware.device.measured.get(self.number_format)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of passes over memory."""
        return self.hardware.device.bandwidth * self.hardware.attained.memory

    def gemm(self, m: int, n: int, k: int, *, count: int = 1, grain: str | None = None) -> float:
        """`count` GEMMs [m, k] x [k, n] at once. `grain`: elements that share an FP8 scale, None outside FP8."""
        if not m * n * k:
            return 0.0
        device, attained = self.hardware.device, self.hardware.attained
        flops, operands, result = 2 * count * m * n * k, count * (m * k + k * n), count * m * n
        if core := self.measured:
            return core.product_s + flops / core.rate + self.bytes * (operands + result) / core.bandwidth
        rate = device.peak_of("fp8" if grain else self.number_format) * attained.gemm_share(self.stack.generation)
        rate *= attained.fp8.get(grain or "", 1.0) * shape_share(count * m, n, k, device.units)
        moved = operands * (1 if grain else self.bytes) + result * self.bytes
        return max(flops / rate, moved / self.bandwidth) * self.stack.attained.slowdown

    def attention(self, heads: int, keys: int, window: int | None, width: int) -> tuple[float, float]:
        """Attention of `heads` of `width` on sequences of `keys`, a forward and its backward."""
        if self.stack.attention == "unfused":
            return self._scores(heads, keys, width)
        span = keys if window is None else window
        seen = span - span * span / (2 * keys)  # the mean: the first queries see fewer
        flops, back = 4 * heads * keys * seen * width, FLASH_BACKWARD
        if core := self.measured:
            costs = [(1 + way.keys / seen + way.width / width) / way.rate for way in (core.attend, core.attend_back)]
            return flops * costs[0], back * flops * costs[1]
        shares = self.hardware.device.reached(self.stack.attention) or UNKNOWN
        seconds = flops / self.hardware.device.peak_of(self.number_format) * self.stack.attained.slowdown
        return seconds / shares.forward, back * seconds / shares.backward

    def _scores(self, heads: int, keys: int, width: int) -> tuple[float, float]:
        """Unfused attention: two GEMMs in a forward, four in a backward, and passes over the scores."""
        scores = heads * keys**2
        query_key, score_value = self.gemm(keys, keys, width, count=heads), self.gemm(keys, width, keys, count=heads)
        forward = query_key + score_value + self.stream(scores * (4 * self.bytes + MASK))
        return forward, query_key + 3 * score_value + self.stream(scores * (5 * self.bytes + MASK))

    def elementwise(self, moved: float) -> float:
        """Element-wise operations that read and write `moved` bytes when fused."""
        return self.stream(moved * (1.0 if self.measured else self.stack.attained.passes))

    def stream(self, moved: float) -> float:
        """One pass over memory, which reads and writes `moved` bytes."""
        core = self.measured
        return moved / core.elementwise if core else moved / self.bandwidth * self.stack.attained.slowdown


def shape_share(m: int, n: int, k: int, units: int) -> float:
    """The share, in (0, 1], of a large GEMM's rate that [m, k] x [k, n] reaches with the best tile on `units`
    multiprocessors. The last wave may leave some idle, tiles may overhang, and k is split where tiles are few.
    """
    return max(_with_tile(m, n, k, units, *tile) for tile in TILES)


def _with_tile(m: int, n: int, k: int, units: int, rows: int, columns: int, speed: float) -> float:
    tiles = math.ceil(m / rows) * math.ceil(n / columns)
    splits = max(1, min(units // tiles, k // (4 * RAMP)))
    waves = math.ceil(tiles * splits / units)
    used = m * n * splits / (waves * units * rows * columns)
    terms = k / splits
    return speed * used * terms / (terms + RAMP)
