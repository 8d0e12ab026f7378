"""Kernel times of one device (`KernelTimes`): GEMMs by shape (`shape_share`), attention, and passes over memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megascale.config.sparse_pattern import Reach
from megascale.plan.account.attended import count_scores_in
from megascale.plan.simulate.profiles import AttentionShares, Hardware, Measured, Stack

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 64, 0.55))
"""Rows, columns and relative speed of a multiprocessor's tiles: small tiles read more operand bytes per FLOP."""

DEFAULT_ATTENTION_SHARES = AttentionShares(forward=0.35, backward=0.35)  # for a device whose profile has no shares
RAMP = 192  # elements of the inner dimension lost to a tile's prologue and epilogue: k takes as long as k + RAMP

GROUP_TILE = 128  # rows of a tile in a grouped GEMM

BLOCK_SCALED = {"mx": "fp8", "nvfp4": "nvfp4"}
"""The peak by which a GEMM runs with scales of blocks of a row, on tensor cores that take them (`Accelerator`)."""

ELEMENT = {"mx": 33 / 32, "nvfp4": 9 / 16}  # bytes of an element with its part of a scale

HOST_WAIT_S = 2e-5
"""Seconds that a device waits while the host reads numbers and launches the next operation: two trips over PCI Express
and a launch, of 5 to 10 us each.
"""

MASK = 1
"""Bytes of a score's dropout mask, as in Megatron-LM. In forward softmax and dropout read and write the score; in
backward both read and write the gradient, and softmax reads the score.
"""

FLASH_BACKWARD = 2.5
"""GEMMs in the backward of fused attention over GEMMs in forward: five to two, with recomputed scores (Dao 2023)."""


@dataclass(frozen=True)
class KernelTimes:
    """Kernel times in seconds on one device with one stack. `dtype`: of GEMMs outside FP8; `bytes`: of an element."""

    hardware: Hardware
    stack: Stack
    dtype: str
    bytes: int

    @property
    def measured(self) -> Measured | None:
        """The measured rates of a processor; None for an accelerator."""
        return self.hardware.device.measured.get(self.dtype)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of passes over memory."""
        return self.hardware.device.bandwidth * self.hardware.attained.memory

    def gemm(self, m: int, n: int, k: int, *, count: int = 1, grain: str | None = None) -> float:
        """Time `count` batched GEMMs [m, k] x [k, n]. `grain`: granularity of FP8 scales, None outside FP8. Operands
        that the tensor cores do not take are decoded.
        """
        if not m * n * k:
            return 0.0
        device, attained = self.hardware.device, self.hardware.attained
        flops, operands, result = 2 * count * m * n * k, count * (m * k + k * n), count * m * n
        if core := self.measured:
            return core.gemm_s + flops / core.rate + self.bytes * (operands + result) / core.bandwidth
        if grain in BLOCK_SCALED and not device.multiplies("nvfp4"):
            return self.gemm(m, n, k, count=count) + self.stream(operands * (ELEMENT[grain] + self.bytes))
        rate = device.peak_of(BLOCK_SCALED.get(grain, "fp8") if grain else self.dtype)
        rate *= attained.gemm_share(self.stack.generation) * attained.fp8.get(grain or "", 1.0)
        rate *= shape_share(count * m, n, k, device.units)
        moved = operands * (ELEMENT.get(grain, 1) if grain else self.bytes) + result * self.bytes
        return max(flops / rate, moved / self.bandwidth) * self.stack.attained.slowdown

    def grouped_gemm(
        self, groups: int, m: float, n: int, k: int, grain: str | None = None, wgrad_grain: str | None = None
    ) -> tuple[float, float]:
        """Time the GEMMs [m, k] x [k, n] of `groups` experts, and those of a weight's gradient, [n, m] x [m, k], in FP8
        with a grain. A processor runs one after the other; a grouped GEMM has whole tiles of rows.
        """
        if self.measured:
            rows = math.ceil(m)
            return groups * self.gemm(rows, n, k, grain=grain), groups * self.gemm(n, k, rows)
        rows = math.ceil(m / GROUP_TILE) * GROUP_TILE
        own = self.gemm(rows, n, k, count=groups, grain=grain)
        return own, self.gemm(n, k, rows, count=groups, grain=wgrad_grain)

    def attention(self, heads: int, keys: int, window: Reach | None, width: int) -> tuple[float, float]:
        """Time attention of `heads` of `width` on sequences of `keys`: forward and backward."""
        if self.stack.attention == "unfused":
            return self._scores(heads, keys, width)
        seen = count_scores_in([keys], window)[1] / keys  # the mean over queries
        flops, back = 4 * heads * keys * seen * width, FLASH_BACKWARD
        if core := self.measured:
            costs = [
                (1 + way.keys / seen + way.width / width) / way.rate
                for way in (core.attention_forward, core.attention_backward)
            ]
            return flops * costs[0], back * flops * costs[1]
        shares = self.hardware.device.attention_shares(self.stack.attention) or DEFAULT_ATTENTION_SHARES
        seconds = flops / self.hardware.device.peak_of(self.dtype) * self.stack.attained.slowdown
        return seconds / shares.forward, back * seconds / shares.backward

    def _scores(self, heads: int, keys: int, width: int) -> tuple[float, float]:
        """Time unfused attention: two GEMMs in forward, four in backward, and passes over the scores."""
        scores = heads * keys**2
        query_key, score_value = self.gemm(keys, keys, width, count=heads), self.gemm(keys, width, keys, count=heads)
        forward = query_key + score_value + self.stream(scores * (4 * self.bytes + MASK))
        return forward, query_key + 3 * score_value + self.stream(scores * (5 * self.bytes + MASK))

    def elementwise(self, moved: float) -> float:
        """Time element-wise operations that move `moved` bytes when fused."""
        return self.stream(moved * (1.0 if self.measured else self.stack.attained.passes))

    def stream(self, moved: float) -> float:
        """Time one pass over memory with `moved` bytes read and written."""
        core = self.measured
        return moved / core.elementwise if core else moved / self.bandwidth * self.stack.attained.slowdown


def shape_share(m: int, n: int, k: int, units: int) -> float:
    """Return the share, in (0, 1], of a large GEMM's rate for [m, k] x [k, n] with the best tile on `units`
    multiprocessors. Losses: an incomplete last wave, partial tiles, and a short k, split (split-K) if tiles are few.
    """
    best = 0.0
    for rows, columns, speed in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        splits = max(1, min(units // tiles, k // (4 * RAMP)))
        waves = math.ceil(tiles * splits / units)
        used = m * n * splits / (waves * units * rows * columns)
        best = max(best, speed * used * (k / splits) / (k / splits + RAMP))
    return best
