"""Rotary position embedding (Su et al. 2021), non-interleaved. At position p, elements i and i + d/2 of a head:

x1' = x1 cos a - x2 sin a    x2' = x2 cos a + x1 sin a    a = p theta^(-2 i / d)    backward: the angle -a

d is the head size, or less: the rest of the head is left alone. `Rope`, `layer_rope`, `rope_table`: a layer's angles,
with scaled frequencies (`ops.rope_scaling`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megascale.catalog.layers import ROPE_SCALINGS
from megascale.config.model import ModelConfig
from megascale.device import copy_to_device
from megascale.layout.sequence_shard import Spans
from megascale.ops.boundaries import Boundaries
from megascale.ops.select import OpBackend, OpContext

Rotate = Callable[[Tensor, int, Tensor, Tensor], Tensor]
"""Arguments: heads [s, b, n, d]; `turned`, the number of leading heads (queries and keys) to rotate, values being left
alone; cos and sin [s, 1 or b, 1, d / 2] for the first d elements of a head, whose dtype is the dtype of computation.
"""

Turn = Callable[[Tensor, int, Tensor, Tensor, float], Tensor]
"""`Rotate` by `sign` times the angles. The opposite sign gives the transpose."""

RopeScaling = Callable[[int, float, int, Mapping[str, Any]], tuple[Tensor, float]]
"""Arguments: d, the rotated elements of a head; theta; sequence length; keys of `model.rope_scaling`. Results: inverse
frequencies [d / 2] in fp64, and the factor of cos and sin.
"""


@dataclass(frozen=True)
class Rope:
    """The rotation of a layer. `d`: rotated elements of a head; `theta`: base of the frequencies; `scaling`: keys and
    values of `model.rope_scaling`.
    """

    d: int
    theta: float
    scaling: tuple[tuple[str, Any], ...] = ()


def layer_rope(model: ModelConfig, layer: int) -> Rope:
    """Return the rotation of layer number `layer`."""
    if model.local_rope_theta is not None and model.given_window(layer):
        return Rope(model.rotary_dim, model.local_rope_theta)
    scaling = {"original_seq_length": model.seq_length} | model.rope_scaling if model.rope_scaling else {}
    return Rope(model.rotary_dim, model.rope_theta, tuple(scaling.items()))


def inverse_frequencies(d: int, theta: float) -> Tensor:
    """Return theta^(-2 i / d), [d / 2] in fp64: radians per position."""
    return theta ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)


@lru_cache(maxsize=32)  # of parts of a sequence, whose number may be large: a table of all may have half a gigabyte
def rope_table(
    s: int, rope: Rope, dtype: torch.dtype, device: torch.device, spans: Spans | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [s, 1, 1, d / 2] of position * frequency in a sequence of s, computed in fp64. `spans`: of the
    positions to return, by default all.
    """
    frequencies, factor = inverse_frequencies(rope.d, rope.theta), 1.0
    if keys := dict(rope.scaling):
        scale: RopeScaling = ROPE_SCALINGS[keys["type"]].load()
        frequencies, factor = scale(rope.d, rope.theta, s, keys)
    positions = torch.cat([torch.arange(*span, dtype=torch.float64, device=device) for span in spans or ((0, s),)])
    angles = torch.outer(positions, copy_to_device(frequencies, device))[:, None, None, :]
    return (factor * angles.cos()).to(dtype), (factor * angles.sin()).to(dtype)


def rope_at(
    boundaries: Boundaries, rope: Rope, table: tuple[Tensor, Tensor], spans: Spans | None = None
) -> tuple[Tensor, Tensor]:
    """Return the rows of a `rope_table` at the positions of tokens within their documents [s, b, 1, d / 2]. `spans`:
    those of the tokens to return, by default all.
    """
    cos, sin = table

    def rows() -> tuple[Tensor, Tensor]:
        positions = boundaries.positions_in(spans)
        return cos[positions].squeeze(2), sin[positions].squeeze(2)

    return boundaries.shared((rope, cos.dtype, spans), rows)


class TorchRope(OpBackend):
    """torch's operators: four passes over half a head, and copies if table and heads differ in dtype."""

    def build(self, context: OpContext) -> Rotate:
        return rotate_heads


def rotate_heads(qkv_sbnd: Tensor, turned: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Implement `Rotate`."""
    return rotate_by(_turn, qkv_sbnd, turned, cos, sin)


def rotate_by(turn: Turn, qkv_sbnd: Tensor, turned: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Implement `Rotate` with an implementation of `Turn` for both directions."""
    if torch.compiler.is_compiling():  # inside a compiled block
        return rotation(qkv_sbnd, turned, cos, sin)
    return _RotateHeads.apply(qkv_sbnd, turned, cos, sin, turn)


class _RotateHeads(torch.autograd.Function):
    """Rotation with the transposed rotation as backward; only cos and sin are saved."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, turned: int, cos: Tensor, sin: Tensor, turn: Turn) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turned, ctx.turn = turned, turn
        return turn(qkv, turned, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return ctx.turn(grads[0], ctx.turned, cos, sin, -1.0), None, None, None, None


def _turn(x: Tensor, turned: int, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Implement `Turn` with torch's operators."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d = 2 * cos.shape[-1]
    source, result = x[:, :, :turned, :d], out[:, :, :turned, :d]
    first, second = source.to(cos.dtype).chunk(2, -1)
    target = result if x.dtype == cos.dtype else torch.empty_like(source, dtype=cos.dtype)
    target_first, target_second = target.chunk(2, -1)
    torch.mul(first, cos, out=target_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=target_second).addcmul_(first, sin, value=sign)
    if x.dtype != cos.dtype:
        result.copy_(target)
    out[:, :, turned:] = x[:, :, turned:]
    if d < x.shape[-1]:
        out[:, :, :turned, d:] = x[:, :, :turned, d:]
    return out


def rotation(x: Tensor, turned: int, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
    """Implement `Turn`, for whole heads without concatenation: torch.compile fuses the formula to a single loop over
    the result.
    """
    d = 2 * cos.shape[-1]
    if d < x.shape[-1]:
        return torch.cat([rotation(x[..., :d], turned, cos, sin, sign), x[..., d:]], -1)
    halves = x.unflatten(-1, (2, -1)).to(cos.dtype)
    signs = torch.arange(-1, 2, 2, device=x.device).view(2, 1) * sign  # - sin for the first half, + sin for the second
    rotated = halves * cos.unsqueeze(-2) + halves.flip(-2) * (sin.unsqueeze(-2) * signs)
    is_turned = torch.arange(x.shape[2], device=x.device).view(-1, 1) < turned
    return torch.where(is_turned, rotated.flatten(-2).to(x.dtype), x)
