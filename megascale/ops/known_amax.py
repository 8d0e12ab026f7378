"""Amaxes of a tensor's rows and columns, kept with the tensor by a kernel that read or wrote it for another purpose.

They hold for this tensor object until it is changed. A view or a copy has none, and is read once more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from megascale.catalog.recipes import ROW, TENSOR, ScaleBlock


@dataclass(frozen=True)
class _Known:
    """`rows` [..., 1] and `columns` [k, 1] of x [..., k] at a version, f32."""

    version: int
    rows: Tensor | None = None
    columns: Tensor | None = None


def keep_amax(x: Tensor, *, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
    """Keep what has been found of max |x| with x. NaN and infinity are found as such."""
    given = {name: value for name, value in (("rows", rows), ("columns", columns)) if value is not None}
    x.known_amax = replace(_known(x), **given)  # type: ignore[attr-defined]


def known_amax(x: Tensor, block: ScaleBlock) -> Tensor | None:
    """Return `fp8.amax` of x if it is known."""
    rows = _known(x).rows
    if rows is None or block not in (ROW, TENSOR):
        return None
    return rows if block == ROW else rows.amax()


def known_column_amax(x: Tensor) -> Tensor | None:
    """Return max |x| of each column of x [..., k], [k, 1], if it is known."""
    return _known(x).columns


def _known(x: Tensor) -> _Known:
    known: _Known | None = getattr(x, "known_amax", None)
    return known if known is not None and known.version == x._version else _Known(x._version)
