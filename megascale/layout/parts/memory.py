"""Activation bytes of a block's parts (`UnitBytes`), and the sizes that they depend on (`ActivationSizes`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megascale.catalog.layers import NORMS
from megascale.config.model import ModelConfig
from megascale.layout.recompute_policy import NO_RECOMPUTE, RecomputePolicy

CAST = 8
"""Bytes of quantizing an element to FP8: fp32 before and after scaling."""


class UnitBytes(NamedTuple):
    """Bytes of a unit, or of a block's part: `saved` for backward; transient peaks of `forward`, of `backward` and of
    `casting` weights to FP8; `gradient`, the input's gradient minus the output's. `elements`: weights of the unit.
    """

    saved: int
    forward: int
    backward: int
    gradient: int = 0
    elements: int = 0
    casting: int = 0


@dataclass(frozen=True)
class ActivationSizes:
    """Sizes of a micro-batch of `micro` sequences on a rank. `tokens` of the micro-batch, `local` in the rank's
    residual stream, fewer if sequence parallelism has `cut` the stream. Bytes of an element: `compute` dtype, `wide`
    accumulation dtype. `cp_heads`, `cp_keys`: ranks that exchange heads, and keys; `gathers`: keys by an all-gather.
    `documents`: their expected lengths in a row with a document mask. `grain`: granularity of FP8 scales; `fp8`: linear
    layers run FP8 GEMMs.
    """

    model: ModelConfig
    micro: int
    tokens: int
    local: int
    tp: int
    cut: bool
    cp_heads: int
    cp_keys: int
    gathers: bool
    compute: int
    wide: int
    documents: Sequence[int]
    grain: str
    fp8: bool = False
    recompute: RecomputePolicy = NO_RECOMPUTE

    @property
    def narrow(self) -> bool:
        """The compute dtype has fewer bytes than the accumulation dtype."""
        return self.compute < self.wide

    @property
    def tensorwise(self) -> bool:
        """One FP8 scale serves forward and wgrad, so saved inputs shrink to FP8."""
        return self.fp8 and self.grain == "tensor"

    @property
    def shrink(self) -> int:
        """The factor by which saved inputs of linear layers shrink."""
        return self.compute if self.tensorwise else 1

    @cached_property
    def full(self) -> int:
        """Bytes of the residual stream for all tokens."""
        return self.tokens * self.model.hidden_size * self.compute

    @cached_property
    def stream(self) -> int:
        """Bytes of the residual stream for the rank's tokens."""
        return self.local * self.model.hidden_size * self.compute

    @property
    def gathered(self) -> int:
        """Bytes of an all-gathered residual stream."""
        return self.full if self.cut else 0

    @property
    def branch(self) -> int:
        """Bytes of the gradient of a residual branch, with dropout."""
        return self.stream if self.model.dropout else 0

    @property
    def mask(self) -> int:
        """Bytes of a dropout mask, one an element."""
        return self.branch // self.compute

    @cached_property
    def norm_saved(self) -> int:
        """Bytes that a norm saves: input and statistics."""
        return self.stream + self.local * self.wide * (2 if NORMS[self.model.norm].facts["mean"] else 1)

    @cached_property
    def norm_backward(self) -> int:
        """Transient bytes of a norm's backward."""
        rms = not NORMS[self.model.norm].facts["mean"]
        if not self.narrow:
            return (3 if rms else 1) * self.stream
        wide_stream = self.local * self.model.hidden_size * self.wide
        return (4 if rms else 3) * wide_stream + (self.stream if rms else 0)

    def of_tile(self, tiles: int) -> ActivationSizes:
        """Return the sizes of the largest of `tiles` of tokens, without recomputation."""
        rows = self.local // self.micro
        share = math.ceil(rows / tiles) / rows
        tokens, local = round(share * self.tokens), round(share * self.local)
        return replace(self, tokens=tokens, local=local, recompute=NO_RECOMPUTE)

    def sharded(self, width: int) -> int:
        """Bytes of a tensor [tokens, width / tp]."""
        return self.tokens * width // self.tp * self.compute

    def wgrad(self, weight_numel: int, nbytes: int) -> int:
        """Size wgrad's result and, in FP8, the operands of `full` and `nbytes` bytes quantized along the tokens."""
        elements = weight_numel // self.tp
        if not self.fp8:
            return elements * self.compute if self.narrow else 0
        first, second = self.full // self.compute, nbytes // self.compute
        cast = 1 if self.tensorwise else CAST + self.compute
        result = elements * self.wide * (3 if self.grain == "block" else 1)  # two partial results and their sum
        return max(cast * first, first + max(cast * second, second + result))


def walk(parts: Sequence[UnitBytes], gradient: int) -> tuple[int, int, int]:
    """Walk backward through parts, from a result's `gradient`: bytes saved, and the peaks of forward and backward."""
    forward, backward, released = 0, gradient, 0
    for part in reversed(parts):
        forward = max(forward, part.forward - released)
        backward = max(backward, gradient + part.backward - released)
        gradient, released = gradient + part.gradient, released + part.saved
    return released, forward, backward
