"""Sizes of a micro-batch on a rank (`MicroBatchSizes`), and what follows from them for a block's parts: collectives
(`CommOp`) and bytes of activations (`UnitBytes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from megascale.catalog.layers import NORMS
from megascale.catalog.recipes import ROW, QuantizerSpec
from megascale.config.model import ModelConfig
from megascale.layout.pieces import MIN_PIECE_BYTES
from megascale.layout.recompute_policy import NO_RECOMPUTE, STAYS, RecomputePolicy

FP32 = 4  # bytes of an FP8 scale or amax


class CommOp(NamedTuple):
    """A collective or message in `group`. `bytes`: of the full tensor, sent in `calls` pieces. `label`: name in the
    event log without the layer. `times`: repetitions in a step or a micro-batch.
    """

    group: str
    operation: str
    bytes: int
    label: str
    calls: int = 1
    times: int = 1


class UnitBytes(NamedTuple):
    """Bytes of a unit, or of a block's part: `saved` for backward; transient peaks of `forward`, of `backward` and of
    `casting` weights to FP8; `gradient`, the input's gradient minus the output's. `elements`: weights of the unit, of
    which `experts` are those of experts. Of a split backward: bytes `left` by I for W, and W's transient peak, `wgrad`.
    `small`: of what is saved, tensors that never leave the device; `moved`: bytes in another store until backward.
    """

    saved: int
    forward: int
    backward: int
    gradient: int = 0
    elements: int = 0
    casting: int = 0
    experts: int = 0
    left: int = 0
    wgrad: int = 0
    small: int = 0
    moved: int = 0


@dataclass(frozen=True)
class MicroBatchSizes:
    """A micro-batch of `batch` sequences, of which a rank has `rows` tokens each. `cut`: sequence parallelism cuts the
    residual stream over `tp`; `pieces`: most chunks of a collective that overlaps with a GEMM. Bytes of an element:
    `compute` dtype, `wide` accumulation dtype. `cp_heads`, `cp_keys`: ranks that exchange heads, and keys, by an
    all-gather if `gathers`; `key_parts`: times that a rank attends to some of the keys. `documents`: their expected
    lengths in a row with a document mask. `recipe`: facts of the FP8 recipe (`catalog.recipes`); `fp8`: the linear
    layers run FP8 GEMMs. `ep`: ranks that exchange tokens, in `token_blocks`, and if `gathers_tokens` by an
    all-gather; `imbalance`: rows of the fullest of them, over the mean. `split`: backwards are split.
    `cast_where_used`: FP8 operands of weights are not kept for the step. `spans`: most spans of consecutive tokens of a
    rank. `input_rank`: elements of a token that linear layers save in place of an input; 0: all. `frozen`: the names in
    a block of weights that are not trained, and of the token embedding.
    """

    model: ModelConfig
    batch: int
    rows: int
    tp: int
    cut: bool
    pieces: int
    compute: int
    wide: int
    cp_heads: int
    cp_keys: int
    key_parts: int
    gathers: bool
    documents: Sequence[int]
    recipe: Mapping[str, Any]
    fp8: bool = False
    recompute: RecomputePolicy = NO_RECOMPUTE
    ep: int = 1
    imbalance: float = 1.0
    gathers_tokens: bool = False
    token_blocks: int = 1
    split: bool = False
    cast_where_used: bool = False
    spans: int = 1
    input_rank: int = 0
    frozen: frozenset[str] = frozenset()

    @property
    def tokens(self) -> int:
        return self.batch * self.rows

    @property
    def local(self) -> int:
        """Tokens of the rank's residual stream."""
        return self.tokens // self.parts

    @property
    def parts(self) -> int:
        """Shards of the residual stream over tp."""
        return self.tp if self.cut else 1

    @property
    def narrow(self) -> bool:
        """The compute dtype has fewer bytes than the accumulation dtype."""
        return self.compute < self.wide

    @property
    def saves_codes(self) -> bool:
        """One FP8 copy serves forward and wgrad, and is what is saved of the inputs of linear layers."""
        return bool(self.fp8 and self.recipe["saves_codes"])

    @cached_property
    def full(self) -> int:
        """Bytes of the residual stream for all tokens."""
        return self.tokens * self.model.hidden_size * self.compute

    @cached_property
    def stream(self) -> int:
        """Bytes of the residual stream for the rank's tokens."""
        return self.local * self.model.hidden_size * self.compute

    @property
    def message(self) -> int:
        """Bytes of a message between pipeline stages: 1 / tp of an activation."""
        return self.full // self.tp

    @property
    def gathered(self) -> int:
        """Bytes of an all-gathered residual stream."""
        return self.full if self.cut else 0

    @property
    def branch(self) -> int:
        """Bytes of the gradient of a residual branch, if it differs from that of the stream."""
        return self.stream if self.model.dropout or self.model.residual_tau else 0

    @property
    def mask(self) -> int:
        """Bytes of a dropout mask, one an element."""
        return self.stream // self.compute if self.model.dropout else 0

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

    def stays(self, nbytes: int) -> int:
        """Size a saved tensor if it never leaves the device (`recompute_policy.STAYS`), else 0."""
        return nbytes if nbytes * STAYS < self.stream else 0

    def of_tile(self, tiles: int) -> MicroBatchSizes:
        """Return the sizes of the largest of `tiles` of tokens, without recomputation."""
        rows = math.ceil(self.rows // self.parts / tiles) * self.parts
        return replace(self, rows=rows, recompute=NO_RECOMPUTE)

    def sharded(self, width: int) -> int:
        """Bytes of a tensor [tokens, width / tp]."""
        return self.tokens * width // self.tp * self.compute

    def saved_input(self, nbytes: int, width: int, whole: bool = True, alone: bool = True) -> int:
        """Size what is saved of the input of linear layers, `nbytes` in rows of `width` elements: its FP8 copy, its
        projection if they `alone` save it, or the input; if that is `whole`, with the amaxes of its columns for scales
        of wgrad (`ops.known_amax`).
        """
        spec, elements = self.recipe["input"], nbytes // self.compute
        if self.input_rank and alone:
            return nbytes // width * self.input_rank
        if self.saves_codes:
            return int(elements // width * sum(spec.row_bytes(width)))
        return nbytes + (FP32 * width if self.fp8 and whole and self.recipe["input_column"].block == ROW else 0)

    def sends_codes(self, operand: str, both: bool = True) -> bool:
        """True if an operand is all-gathered as codes, for the GEMM or with `both` also for that of its transpose."""
        return bool(self.fp8 and (not both or self.recipe[operand].serves_transpose))

    def sent(self, operand: str, width: int, both: bool = True) -> tuple[int, int]:
        """Size a row of an operand, and its scales, as it is all-gathered (`sends_codes`)."""
        codes, scales = self.recipe[operand].row_bytes(width)
        return (codes, scales) if self.sends_codes(operand, both) else (width * self.compute, 0)

    def wgrad(self, weight_numel: int, nbytes: int) -> int:
        """Size wgrad's result and, in FP8, the operands of `full` and `nbytes` bytes quantized along the tokens."""
        elements = weight_numel // self.tp
        if not self.fp8:
            return elements * self.compute if self.narrow else 0
        return self.cast_wgrad(elements, self.full // self.compute, nbytes // self.compute)

    def cast_wgrad(self, elements: int, first: int, second: int) -> int:
        """Size wgrad's result of `elements`, and its operands of `first` and `second`, quantized along the tokens."""
        column: QuantizerSpec = self.recipe["input_column"]
        cast = 1 if self.recipe["input"].block.serves_transpose else column.cast_bytes + self.compute
        in_parts = column.block.k and not column.decoded_bytes  # two results of blocks and their sum
        result = elements * self.wide * (3 if in_parts else 1) + column.decoded_bytes * (first + second)
        return max(cast * first, first + max(cast * second, second + result))

    def gather(self, label: str, rows: int, width: int, overlap: bool = False) -> list[CommOp]:
        """All-gather `rows` positions of `width` bytes, if `cut`. `overlap`: with a GEMM, in pieces."""
        return [self._collective("all_gather", label, rows, width, overlap)] if self.cut and width else []

    def reduce(self, label: str, rows: int, width: int, overlap: bool = False) -> CommOp:
        """Reduce-scatter `rows` positions of `width` bytes if `cut`, else all-reduce."""
        return self._collective("reduce_scatter" if self.cut else "all_reduce", label, rows, width, overlap)

    def amaxes(self, layer: str, operand: str, rows: int) -> list[CommOp]:
        """All-reduce over tp the amaxes of a layer's FP8 operand, of which ranks have parts: all, or of `rows` rows."""
        count = self.recipe[operand].count_amaxes(rows) if self.fp8 else 0
        return [CommOp("tp", "all_reduce", count * FP32, f"{layer}.{operand} amax")] if count else []

    def token_amaxes(self, operand: str, widths: list[int]) -> Iterator[CommOp]:
        """All-reduce over cp the amaxes of scales that cover the tokens of a micro-batch: of operands of these widths,
        or of their transposes, which have as many rows.
        """
        spec, transposed = self.recipe[operand], operand.endswith("_column")
        if not self.fp8 or (transposed and spec.block.serves_transpose):
            return
        for count in (spec.count_amaxes(width if transposed else 0) for width in widths):
            for group, ranks in (("cp.heads", self.cp_heads), ("cp.keys", self.cp_keys)):
                if count and ranks > 1:
                    yield CommOp(group, "all_reduce", FP32 * count, "amax")

    def _collective(self, operation: str, label: str, rows: int, width: int, overlap: bool) -> CommOp:
        nbytes = rows * self.batch * width
        pieces = max(1, min(self.pieces, nbytes // self.parts // MIN_PIECE_BYTES)) if overlap else 1
        return CommOp("tp", operation, nbytes, label, min(pieces, rows // self.parts))


def walk(parts: Sequence[UnitBytes], gradient: int, split: bool) -> UnitBytes:
    """Walk backward through parts, from a result's `gradient`. `split`: a part leaves what W needs."""
    forward, backward, saved, left = 0, gradient, 0, 0
    for part in reversed(parts):
        forward = max(forward, part.forward - saved)
        backward = max(backward, gradient + part.backward + left - saved)
        gradient, saved, left = gradient + part.gradient, saved + part.saved, left + (part.left if split else 0)
    return UnitBytes(saved, forward, backward, left=left, wgrad=max(part.wgrad for part in parts))
