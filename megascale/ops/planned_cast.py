"""Casts that a kernel makes of what it writes, where the scale is known before: the cast's own read is spared.

A linear layer plans the cast of an operand. The plan goes to the kernel that writes the operand, with its input, and
the cast back with the operand, for as long as an amax holds (`ops.known_amax`). Kernels need not cast. The operand is
written in 16 bits too, for autograd, which gives a gradient the dtype of its tensor, and for any other reader.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megascale.ops.fp8 import CastRecord
from megascale.ops.quantized import ElementFormat, Quantized


class PlannedCast(NamedTuple):
    """Arguments of `fp8.Cast` with a scale for the tensor, by the amax `expected`, f32 []."""

    expected: Tensor
    element: ElementFormat
    record: CastRecord | None


def plan_casts(x: Tensor, result: PlannedCast | None, gradient: PlannedCast | None) -> None:
    """Plan the casts of f(x) and of the gradient of x, for the function f."""
    x.planned_casts = result, gradient  # type: ignore[attr-defined]


def planned_casts(x: Tensor) -> tuple[PlannedCast | None, PlannedCast | None]:
    """Return the plans for f(x) and for the gradient of x."""
    return getattr(x, "planned_casts", (None, None))


def keep_cast(x: Tensor, cast: Quantized) -> None:
    """Keep a planned cast with x."""
    x.kept_cast = x._version, cast  # type: ignore[attr-defined]


def kept_cast(x: Tensor) -> Quantized | None:
    """Return the planned cast of x, if it has been made."""
    version, cast = getattr(x, "kept_cast", (None, None))
    return cast if version == x._version else None


def taken_cast(x: Tensor) -> Quantized | None:
    """Return the planned cast of x, which is kept no longer."""
    cast, x.kept_cast = kept_cast(x), (None, None)  # type: ignore[attr-defined]
    return cast
