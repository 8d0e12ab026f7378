"""Casts that a kernel makes of what it writes, where the scale is known before: the cast's own read is spared.

A linear layer plans the cast of an operand (`PlannedCast`). The plan goes to the kernel that writes the operand with that
kernel's input (`plan_casts`), and the cast back to the layer with the operand (`keep_cast`), which holds as long as an
amax does (`ops.known_amax`). The operand is written in 16 bits too: autograd hands it on. Kernels need not cast.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megascale.ops.fp8 import CastRecord
from megascale.ops.quantized import Fp8Format, Quantized


class PlannedCast(NamedTuple):
    """Arguments of `fp8.Cast` with a scale for the tensor, by the amax `expected`, f32 []."""

    expected: Tensor
    element: Fp8Format
    record: CastRecord | None


Plans = tuple[PlannedCast | None, PlannedCast | None]
"""Of a function's result, and of the gradient of its input."""


def plan_casts(x: Tensor, plans: Plans) -> None:
    """Give plans to the function whose input is x."""
    x.planned_casts = plans  # type: ignore[attr-defined]


def planned_casts(x: Tensor) -> Plans:
    plans: Plans = getattr(x, "planned_casts", (None, None))
    return plans


def keep_cast(x: Tensor, cast: Quantized) -> None:
    """Keep a planned cast with x."""
    x.kept_cast = x._version, cast  # type: ignore[attr-defined]


def kept_cast(x: Tensor) -> Quantized | None:
    """Return the planned cast of x, if it has been made."""
    version, cast = getattr(x, "kept_cast", (None, None))
    return cast if version == x._version else None
