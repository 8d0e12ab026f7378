"""Seconds of what a device does: matrix products by their shape, attention, and passes over memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megascale.plan.profiles import Hardware, Measured, Stack

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 64, 0.55))
"""Rows and columns of the result that a multiprocessor computes at once, and the speed of it: small tiles read more for
each product.
"""

UNKNOWN = 0.35
"""Of the peak what a kernel of attention reaches where a device's profile names none."""

WIDTHS = {
    "flash1": (32, 64, 128),
    "triton": (16, 32, 64, 128),
    "flash2": (32, 64, 96, 128, 160, 192, 224, 256),
    "flash3": (64, 96, 128, 192, 256),
}
"""Of a head, for which kernels of attention are written: a narrower one takes as long as the next of them."""

RAMP = 192
"""Terms of a sum during which a tile's pipeline fills and drains: a product of k terms takes as long as one of k + RAMP
in a steady state.
"""


@dataclass(frozen=True)
class Kernels:
    """The times of one device with one stack. `number_format`: of matrix products; `bytes`: of their numbers."""

    hardware: Hardware
    stack: Stack
    number_format: str
    bytes: int

    def gemm(self, m: int, n: int, k: int, *, count: int = 1, eight_bit: bool = False) -> float:
        """Of `count` products [m, k] x [k, n] at once. `eight_bit`: of fp8 numbers."""
        if not m * n * k:
            return 0.0
        device, attained = self.hardware.device, self.hardware.attained
        peak = device.peak_of("fp8" if eight_bit else self.number_format)
        if found := self.measured:
            numbers = count * self.bytes * (m * k + k * n + m * n)
            return found.product_s + 2 * count * m * n * k / found.rate + numbers / found.bandwidth
        compute = 2 * count * m * n * k / (peak * attained.gemm * shape_share(count * m, n, k, device.units))
        size = 1 if eight_bit else self.bytes
        moved = count * (size * (m * k + k * n) + self.bytes * m * n) / (device.bandwidth * attained.memory)
        return max(compute, moved) * self.stack.attained.slowdown

    @property
    def measured(self) -> Measured | None:
        """What was measured, on a processor; the rest of the device's profile is of accelerators."""
        return self.hardware.device.measured.get(self.number_format)

    def attention(self, flops: float, *, backward: bool, seen: float, width: int) -> float:
        """Of scores and their product with the values in one kernel. `flops`: of those that it computes; `seen`: keys
        that a query sees, the mean; `width`: of a head.
        """
        if found := self.measured:
            way = found.attend_back if backward else found.attend
            return flops * (1 + way.keys / seen + way.width / width) / way.rate
        peak = self.hardware.device.peak_of(self.number_format)
        shares = self.hardware.device.reached(self.stack.attention)
        if shares is None:
            return flops / (peak * UNKNOWN) * self.stack.attained.slowdown
        reached = shares.backward if backward else shares.forward
        wide = next((each for each in WIDTHS.get(self.stack.attention, ()) if each >= width), width)
        return flops * wide / width / (peak * reached) * self.stack.attained.slowdown

    def memory(self, moved: float) -> float:
        """Of element-wise operations that read and write `moved` bytes, were they fused."""
        return self.stream(moved * (1.0 if self.measured else self.stack.attained.passes))

    def stream(self, moved: float) -> float:
        """Of operations that read and write `moved` bytes, just as often as they do."""
        if found := self.measured:
            return moved / found.elementwise
        rate = self.hardware.device.bandwidth * self.hardware.attained.memory
        return moved / rate * self.stack.attained.slowdown

    def between(self, moved: float) -> float:
        """Of a layer's forward besides its products and attention. `moved`: as for `memory`."""
        return self.memory(moved) + (self.measured.layer_s if self.measured else 0.0)

    def update(self, moved: float) -> float:
        """Of an optimizer that reads and writes `moved` bytes."""
        return moved / (self.hardware.device.bandwidth * self.hardware.attained.memory)


def shape_share(m: int, n: int, k: int, units: int) -> float:
    """The part of the rate of a large product that one of [m, k] x [k, n] has on `units` multiprocessors, in (0, 1]:
    the best of the tiles, of which the last wave may be few and the last row and column stand over; and k may be cut
    where the tiles are fewer than the units.
    """
    return max(_with_tile(m, n, k, units, *tile) for tile in TILES)


def _with_tile(m: int, n: int, k: int, units: int, rows: int, columns: int, speed: float) -> float:
    tiles = math.ceil(m / rows) * math.ceil(n / columns)
    cuts = max(1, min(units // tiles, k // (4 * RAMP)))
    waves = math.ceil(tiles * cuts / units)
    used = m * n * cuts / (waves * units * rows * columns)
    terms = k / cuts
    return speed * used * terms / (terms + RAMP)
