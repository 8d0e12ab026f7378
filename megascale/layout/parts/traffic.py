"""Collectives and messages of a block's parts (`CommOp`), and the sizes that they depend on (`TrafficSizes`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megascale.layout.pieces import MIN_PIECE_BYTES

FP32 = 4
"""Bytes of an FP8 scale or amax."""

SCALE_BLOCK = 128
"""Elements of a row with one FP8 scale in block-wise granularity (`ops.fp8`)."""


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


@dataclass(frozen=True)
class TrafficSizes:
    """Sizes of a micro-batch of `batch` sequences, of which a rank has `rows` tokens each. `cut`: sequence parallelism;
    `pieces`: most chunks of a collective that overlaps with a GEMM; bytes of an element: `compute` dtype, `wide`
    accumulation dtype. FP8: `grain`, granularity of the scales, empty in other dtypes; `current`: scales come from the
    tensor itself. `cp_heads`, `cp_keys`: ranks that exchange heads, and keys; `gathers`: keys by an all-gather.
    """

    rows: int
    batch: int
    tp: int
    cut: bool
    pieces: int
    compute: int
    wide: int
    grain: str
    current: bool
    cp_heads: int = 1
    cp_keys: int = 1
    gathers: bool = False

    @property
    def parts(self) -> int:
        """Shards of the residual stream over tp."""
        return self.tp if self.cut else 1

    def gather(self, label: str, rows: int, width: int, overlap: bool = False) -> list[CommOp]:
        """All-gather `rows` positions of `width` bytes, if `cut`. `overlap`: with a GEMM, in pieces."""
        return [self._collective("all_gather", label, rows, width, overlap)] if self.cut and width else []

    def reduce(self, label: str, rows: int, width: int, overlap: bool = False) -> CommOp:
        """Reduce-scatter `rows` positions of `width` bytes if `cut`, else all-reduce."""
        return self._collective("reduce_scatter" if self.cut else "all_reduce", label, rows, width, overlap)

    def amaxes(self, operand: str, tensors: int, rows: int) -> list[CommOp]:
        """All-reduce an FP8 operand's amaxes over tp, by granularity: of `tensors`, of `rows`, or none."""
        count = {"tensor": tensors, "row": rows}.get(self.grain, 0) if self.current else 0
        return [CommOp("tp", "all_reduce", count * FP32, f"{operand} amax")] if count else []

    def token_amaxes(self, tensors: int, rows: list[int]) -> Iterator[CommOp]:
        """All-reduce amaxes whose scales cover a micro-batch's tokens over cp: of `tensors`, or of `rows` of each."""
        counts = {"tensor": [1] * tensors, "row": rows}.get(self.grain, []) if self.current else []
        groups = [group for group, ranks in (("cp.heads", self.cp_heads), ("cp.keys", self.cp_keys)) if ranks > 1]
        return (CommOp(group, "all_reduce", FP32 * count, "amax") for count in counts for group in groups)

    def _collective(self, operation: str, label: str, rows: int, width: int, overlap: bool) -> CommOp:
        nbytes = rows * self.batch * width
        pieces = max(1, min(self.pieces, nbytes // self.parts // MIN_PIECE_BYTES)) if overlap else 1
        return CommOp("tp", operation, nbytes, label, min(pieces, rows // self.parts))
