"""Overlap of tensor-parallel collectives with the GEMMs beside them (MegaScale 3.2, figure 3).

`all_gather_matmul` computes this rank's own rows at once and the other rows in pieces, as the pieces arrive.
`matmul_reduce_scatter` computes in pieces, the rows of other ranks first, and sends a piece during the next GEMM:

    all_gather_matmul      compute  | own rows | piece 1 | piece 2 |
                           receive  | piece 1  | piece 2 |
    matmul_reduce_scatter  compute  | piece 1  | piece 2 | own rows |
                           send                | piece 1 | piece 2  |

The bytes sent are those of one collective. A collective is not cut into pieces where cutting has no benefit: if the
transport makes no progress while this rank computes (shared memory), or if the GEMM of a piece would have too few rows
for a GPU (`layout.pieces`). `TensorParallel` holds the tp group and these choices, `LinearParams` a layer's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.comm import symmetric_memory
from megascale.comm.collectives import (
    ReduceScatterPieces,
    all_gather,
    all_gather_pieces,
    all_reduce,
    labelled_pieces,
    reduce_scatter,
)
from megascale.comm.group import Group
from megascale.comm.work import COMPLETED, Work
from megascale.core.label import Label
from megascale.layout.pieces import MAX_GPU_P2P_RANKS, MAX_PIECES, MIN_GPU_GEMM_ROWS, MIN_PIECE_BYTES, max_pieces
from megascale.ops.fp8 import Quantized, ScaleGranularity
from megascale.parallel.gemm_precision import NATIVE_PRECISION, GemmPrecision, GemmWeight, Operand

SCALES_ALIGNED = 4
"""Scales in 16 bytes. cuBLAS wants the row scales of a GEMM aligned to 16 bytes."""


class LinearParams(NamedTuple):
    """This rank's weight [n, k], sharded in one dimension, bias [n], and GEMM precision of a linear layer."""

    weight: Tensor
    bias: Tensor | None = None
    precision: GemmPrecision = NATIVE_PRECISION


@dataclass(frozen=True)
class TensorParallel:
    """The tp group and its communication settings.

    `sequence_parallel`: activations between layers are sharded along dimension 0. `overlap`: communicate during GEMMs.
    `symmetric_memory`: use torch's fused operators. `gpu`: GEMMs run on a GPU and need many rows.
    """

    group: Group
    sequence_parallel: bool = False
    overlap: bool = True
    symmetric_memory: bool = False
    gpu: bool = False

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def index(self) -> int:
        return self.group.index

    @property
    def sharded(self) -> bool:
        """True if a rank holds only a shard of the activations between layers."""
        return self.sequence_parallel and self.size > 1

    def gather(self, x: Tensor, label: Label, *, wait: bool = True) -> tuple[Tensor, Work]:
        """All-gather x [s / size, ...] along dimension 0; return x itself if activations are not sharded."""
        if not self.sharded:
            return x, COMPLETED
        full = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        return full, all_gather(self.group, full, x.contiguous(), label=label, wait=wait)

    def reduce(self, x: Tensor, label: Label, *, wait: bool = True) -> tuple[Tensor, Work]:
        """Reduce-scatter x [s, ...] along dimension 0; all-reduce x without sequence parallelism. May overwrite x."""
        if self.size == 1:
            return x, COMPLETED
        if not self.sequence_parallel:
            return x, all_reduce(self.group, x, label=label, wait=wait)
        shard = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        return shard, reduce_scatter(self.group, shard, x, label=label, wait=wait)

    def gather_operand(self, x: Operand, label: Label, *, wait: bool = True) -> tuple[Operand, Work]:
        """`gather` for a GEMM operand. An FP8 operand is gathered as bytes, after its scales if scales are per row."""
        if isinstance(x, Tensor) or not self.sharded:
            return (x, COMPLETED) if isinstance(x, Quantized) else self.gather(x, label, wait=wait)
        scale = self.gather_scale(x, label)
        data, gathering = self.gather(x.data.view(torch.uint8), label, wait=wait)
        return Quantized(data.view(x.data.dtype), scale, x.granularity), gathering

    def gather_scale(self, x: Quantized, label: Label) -> Tensor:
        """Return the scales of the gathered x."""
        if x.granularity is ScaleGranularity.TENSOR:
            return x.scale
        return self.gather(x.scale, label.with_suffix("scales"))[0]

    def use_symmetric_memory(self, inputs: Sequence[Operand], weights: Iterable[Operand], rows: int) -> bool:
        """True if torch's fused operators can run these GEMMs, with `rows` rows per rank.

        The operators take a single input, and operands without scales or with scales of equal granularity, per tensor
        or per row.
        """
        if not (self.symmetric_memory and self.sharded and self.overlap) or len(inputs) > 1 or rows < MIN_GPU_GEMM_ROWS:
            return False
        scalings = {operand.granularity if isinstance(operand, Quantized) else None for operand in (*inputs, *weights)}
        if scalings == {None}:
            return True
        aligned = rows % SCALES_ALIGNED == 0
        return symmetric_memory.has_scaled_matmul() and (
            scalings == {ScaleGranularity.TENSOR} or (scalings == {ScaleGranularity.ROW} and aligned)
        )

    def num_pieces(self, shard: Operand) -> int:
        """Return the number of pieces for a rank's shard [s, b, k] of a collective; 0 for a single collective."""
        if not self.overlap or self.group.p2p_transport is None:
            return 0
        pieces = max(1, min(MAX_PIECES, shard.nbytes // MIN_PIECE_BYTES))
        if not self.gpu:
            return pieces
        # Pieces of sharded activations are p2p messages to every rank; otherwise each piece is an all-reduce.
        if self.sharded and self.size > MAX_GPU_P2P_RANKS:
            return 0
        return min(pieces, max_pieces(*shard.shape[:2]))


def all_gather_matmul(
    shard: Operand, layers: Sequence[GemmWeight], tp: TensorParallel, label: Label, dtype: torch.dtype,
    on_rows: Callable[[Operand, slice], None] | None = None,
    after_all_gather: Callable[[Operand], Operand] = lambda x: x,
) -> tuple[Operand, list[Tensor]]:  # fmt: skip
    """All-gather the shard [s / tp, b, k] into X, and compute X W^T + b for several layers, in `dtype`.

    Returns X and the outputs [s, b, n]. Without sharded activations X is the shard. `on_rows(X, rows)` is called when
    rows of X are complete: once for all rows, or first for this rank's own rows, during communication, and then for the
    remaining rows. `after_all_gather` turns gathered rows into a GEMM operand.
    """
    on_rows = on_rows or (lambda full, rows: None)
    pieces = tp.num_pieces(shard) if tp.sharded else 0
    weights = [layer.weight for layer in layers]
    if tp.use_symmetric_memory([shard], weights, shard.shape[:-1].numel()):
        full, outputs = _symmetric_all_gather_matmul(shard, weights, tp, label, dtype)
        pairs = zip(outputs, layers, strict=True)
        outputs = [out if bias is None else out.add_(bias) for out, (_, bias, _) in pairs]
    elif not pieces:
        full, _ = tp.gather_operand(shard, label)
        operand = after_all_gather(full)
        outputs = [precision.gemm(operand, weight, bias, dtype) for weight, bias, precision in layers]
    else:
        return _all_gather_matmul_pieces(shard, layers, tp, label, pieces, dtype, on_rows, after_all_gather)
    on_rows(full, slice(0, full.shape[0]))
    return full, outputs


def _symmetric_all_gather_matmul(
    shard: Operand, weights: Sequence[Operand], tp: TensorParallel, label: Label, dtype: torch.dtype
) -> tuple[Operand, list[Tensor]]:
    if isinstance(shard, Tensor):
        matrices = [weight.t() for weight in weights if isinstance(weight, Tensor)]
        return symmetric_memory.all_gather_matmul(tp.group, shard.contiguous(), matrices, label=label)
    scale = tp.gather_scale(shard, label)
    scaled = [_scaled_matrix(weight) for weight in weights if isinstance(weight, Quantized)]
    data, outputs = symmetric_memory.all_gather_scaled_matmul(tp.group, shard.data, scale, scaled, dtype, label=label)
    return Quantized(data, scale, shard.granularity), outputs


def _scaled_matrix(weight: Quantized) -> symmetric_memory.ScaledMatrix:
    """Transpose a weight [n, k] to the right-hand operand [k, n], and its scale, [] or [1, n] for per-row scales."""
    return symmetric_memory.ScaledMatrix(weight.data.t(), weight.scale.t(), weight.use_fast_accum)


def _all_gather_matmul_pieces(
    shard: Operand, layers: Sequence[GemmWeight], tp: TensorParallel, label: Label, pieces: int, dtype: torch.dtype,
    on_rows: Callable[[Operand, slice], None], after_all_gather: Callable[[Operand], Operand],
) -> tuple[Operand, list[Tensor]]:  # fmt: skip
    n = shard.shape[0]
    sent = shard.data.view(torch.uint8) if isinstance(shard, Quantized) else shard.contiguous()
    received = sent.new_empty(n * tp.size, *sent.shape[1:])
    full: Operand = received
    if isinstance(shard, Quantized):
        full = Quantized(received.view(shard.data.dtype), tp.gather_scale(shard, label), shard.granularity)
    outputs = [received.new_empty(*full.shape[:-1], weight.shape[0], dtype=dtype) for weight, _, _ in layers]
    for number, (ready, pending) in enumerate(all_gather_pieces(tp.group, received, sent, pieces, label=label)):
        pending.wait()
        for rows in ready:
            operand = after_all_gather(full[rows])
            for out, (weight, bias, precision) in zip(outputs, layers, strict=True):
                precision.gemm_out(out[rows], operand, weight, bias)
        if number == 0:  # this rank's own rows
            on_rows(full, slice(n * tp.index, n * (tp.index + 1)))
    for rows in (slice(0, n * tp.index), slice(n * (tp.index + 1), n * tp.size)):
        if rows.start < rows.stop:
            on_rows(full, rows)
    return full, outputs


def matmul_reduce_scatter(
    inputs: Sequence[Operand], layers: Sequence[GemmWeight], tp: TensorParallel, label: Label, dtype: torch.dtype
) -> Tensor:
    """Compute the sum over layers and tp ranks of X W^T, for inputs [s, b, k] and weights [n, k], in `dtype`.

    The result is [s, b, n], or this rank's shard [s / tp, b, n] with sequence parallelism. Biases are left to the
    caller: added here, every rank would contribute its copy.
    """
    x, matrix = inputs[0], layers[0].weight
    if tp.use_symmetric_memory(inputs, [layer.weight for layer in layers], x.shape[:-1].numel() // tp.size):
        return _symmetric_matmul_reduce_scatter(x, matrix, tp, label, dtype)
    full = x.new_empty(*x.shape[:-1], matrix.shape[0], dtype=dtype)

    def compute_rows(rows: slice) -> None:
        for number, (x, (weight, _, precision)) in enumerate(zip(inputs, layers, strict=True)):
            precision.gemm_out(full[rows], x[rows], weight, add=number > 0)

    shard = full[: full.shape[0] // tp.size]
    pieces = tp.num_pieces(shard if tp.sequence_parallel else full)
    if not pieces:
        compute_rows(slice(0, full.shape[0]))
        return tp.reduce(full, label)[0]
    if tp.sequence_parallel:
        out = torch.empty_like(shard)
        scatter = ReduceScatterPieces(tp.group, out, full, pieces, label=label)
        for rows_to_send in scatter.rows_per_send:
            for rows in rows_to_send:
                compute_rows(rows)
            scatter.send_piece()
        scatter.wait_and_reduce()
        return out
    reductions = []
    for rows, piece_label in labelled_pieces(full.shape[0], pieces, label):
        compute_rows(rows)
        reductions.append(all_reduce(tp.group, full[rows], label=piece_label, wait=False))
    for reduction in reductions:
        reduction.wait()
    return full


def _symmetric_matmul_reduce_scatter(
    x: Operand, weight: Operand, tp: TensorParallel, label: Label, dtype: torch.dtype
) -> Tensor:
    if isinstance(x, Tensor) and isinstance(weight, Tensor):
        return symmetric_memory.matmul_reduce_scatter(tp.group, x, weight.t(), label=label)
    assert isinstance(x, Quantized) and isinstance(weight, Quantized), "both operands are FP8, or neither"
    scaled = _scaled_matrix(weight)
    return symmetric_memory.scaled_matmul_reduce_scatter(tp.group, x.data, x.scale, scaled, dtype, label=label)
