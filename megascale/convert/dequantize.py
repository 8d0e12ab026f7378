"""Quantized weights of published files, which are read as bf16.

    MXFP4   gpt-oss       X [..., k, n] is X_blocks [..., n, k / 32, 16], two 4-bit numbers a byte, the lower one first,
                          times 2^(s - 127) for s of X_scales [..., n, k / 32]
    FP8     DeepSeek-V3   X [n, k] in e4m3, times X_scale_inv of tiles of 128 x 128

`unquantized`: the names that stand for such tensors; `described`, `read`: their shape and their elements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from megascale.convert.config_file import TILE
from megascale.core.errors import CheckpointError

Box = tuple[slice | int, ...]

BLOCKS, SCALES, TILE_SCALES = "_blocks", "_scales", "_scale_inv"  # ends of names

GROUP = 32  # elements with a scale, of MXFP4

POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of 3 bits; a fourth bit is the sign (OCP Microscaling Formats, version 1.0)."""

Header = tuple[tuple[int, ...], str]
"""Shape of a stored tensor, and its dtype as in safetensors."""


def unquantized(stored: Collection[str]) -> dict[str, str]:
    """The tensors that `stored` names stand for, each with the name of its elements."""
    packed = {name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)}
    scales = {f"{name}{SCALES}" for name in packed} | {f"{name}{TILE_SCALES}" for name in stored}
    kept = (name for name in stored if name not in scales)
    return {name.removesuffix(BLOCKS) if name.removesuffix(BLOCKS) in packed else name: name for name in kept}


def described(name: str, stored: Collection[str], header: Callable[[str], Header]) -> Header:
    """Shape and dtype of a tensor, by the headers of what is stored for it.

    Raises: CheckpointError for scales that are missing or of another shape
    """
    if f"{name}{BLOCKS}" in stored:
        (*outer, rows, groups, _), _ = header(f"{name}{BLOCKS}")
        shape, scales, expected = (*outer, groups * GROUP, rows), f"{name}{SCALES}", (*outer, rows, groups)
    elif f"{name}{TILE_SCALES}" in stored:
        shape, _ = header(name)
        scales, expected = f"{name}{TILE_SCALES}", tuple(-(-size // TILE) for size in shape)
    else:
        return header(name)
    if scales not in stored or header(scales)[0] != expected:
        raise CheckpointError(f"{name} needs {scales} of shape {list(expected)}", hint="all files of the weights")
    return shape, "BF16"


def read(name: str, box: Box, stored: Collection[str], part: Callable[[str, Box], Tensor]) -> Tensor:
    """Read a box of a tensor. `part`: of a stored tensor."""
    if f"{name}{BLOCKS}" in stored:
        *outer, columns, rows = box
        assert isinstance(columns, slice), "the inputs of a matrix are read as a range"
        first = columns.start // GROUP
        inner = (*outer, rows, slice(first, -(-columns.stop // GROUP)))
        numbers = _from_mxfp4(part(f"{name}{BLOCKS}", inner), part(f"{name}{SCALES}", inner))
        return numbers[..., columns.start - first * GROUP : columns.stop - first * GROUP].transpose(-2, -1)
    if f"{name}{TILE_SCALES}" in stored:
        (tile_rows, row_tiles), (tile_columns, column_tiles) = map(_tiles, box)
        scales = part(f"{name}{TILE_SCALES}", (tile_rows, tile_columns)).float()
        return (part(name, box).float() * scales[row_tiles][:, column_tiles]).bfloat16()
    return part(name, box)


def _from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers [..., n, k], bf16, of blocks [..., n, k / 32, 16] and scales [..., n, k / 32]."""
    table = torch.tensor([*POSITIVE, *(-number for number in POSITIVE)], dtype=torch.bfloat16)
    numbers = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1).flatten(-2)
    return torch.ldexp(numbers, scales.int().sub_(127).unsqueeze(-1)).flatten(-2)


def _tiles(span: Any) -> tuple[slice, Tensor]:
    """The tiles that a range of rows or columns is in, and the place among them of each of the range."""
    first = span.start // TILE
    return slice(first, -(-span.stop // TILE)), torch.arange(span.start, span.stop, span.step or 1) // TILE - first
