"""Amaxes of a tensor's rows and columns, kept with the tensor by a kernel that read or wrote it for another purpose.

They hold for this tensor object until torch counts a change of it; a collective or a kernel that writes to it is not
counted. A view or a copy has none, and is read once more, but for `detach_known`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class _Known:
    """`rows` [..., 1], or [] of all rows, and `columns` [k, 1], f32 or of x's dtype, of x [..., k] at a version."""

    version: int
    rows: Tensor | None = None
    columns: Tensor | None = None


def keep_amax(x: Tensor, *, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
    """Keep what has been found of max |x| with x. NaN and infinity are found as such."""
    known = _known(x)
    rows, columns = known.rows if rows is None else rows, known.columns if columns is None else columns
    x.known_amax = _Known(known.version, rows, columns)  # type: ignore[attr-defined]


def known_amax(x: Tensor) -> Tensor | None:
    """Return max |x|, f32 [], if it is known."""
    rows = _known(x).rows
    return rows.amax().float() if rows is not None and rows.dim() else rows


def known_column_amax(x: Tensor) -> Tensor | None:
    """Return max |x| of each column of x [..., k], f32 [k, 1], if it is known."""
    return _known(x).columns


def detach_known(x: Tensor) -> Tensor:
    """Return x outside of autograd, with what is kept with it."""
    out = x.detach()
    out.known_amax = _known(x)  # type: ignore[attr-defined]
    return out


def with_row_amax(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """Let a function that returns a tensor, or several, also return the amaxes of the last one's rows. They are exact
    if a compiler takes them before rounding, which keeps the order of magnitudes: they are rounded alike.
    """

    def call(*args: Any) -> tuple[Tensor, ...]:
        out = function(*args)
        results = (out,) if isinstance(out, Tensor) else out
        return *results, results[-1].detach().abs().amax(-1, keepdim=True)

    return call


def keeping_row_amax(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Undo `with_row_amax`, and keep the amaxes with the tensor."""

    def call(*args: Any) -> Any:
        *results, rows = function(*args)
        keep_amax(results[-1], rows=rows)
        return results[0] if len(results) == 1 else tuple(results)

    return call


def _known(x: Tensor) -> _Known:
    known: _Known | None = getattr(x, "known_amax", None)
    return known if known is not None and known.version == x._version else _Known(x._version)
