"""Overlap of tensor-parallel collectives with the GEMMs beside them (MegaScale 3.2, figure 3).

With sequence parallelism `all_gather_matmul` computes this rank's own rows at once and the other rows in pieces, as the
pieces arrive. `matmul_reduce_scatter` computes in pieces, the rows of other ranks first, and sends a piece during the
next GEMM:

    all_gather_matmul      compute  | own rows | piece 1 | piece 2 |
                           receive  | piece 1  | piece 2 |
    matmul_reduce_scatter  compute  | piece 1  | piece 2 | own rows |
                           send                | piece 1 | piece 2  |

Without sequence parallelism activations are replicated: `all_gather_matmul` is a GEMM without communication, and
`matmul_reduce_scatter` all-reduces its pieces.

The bytes sent are those of one collective. A collective is not split into pieces where this has no benefit: if the
transport makes no progress while this rank computes (shared memory), or if the GEMM of a piece would have too few rows
for a GPU (`layout.gpu_overlap`). `TensorParallel` holds the tp group and these choices, `LinearParams` a layer's
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

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
from megascale.layout.gpu_overlap import can_fuse, max_pieces
from megascale.layout.pieces import MAX_PIECES, MIN_PIECE_BYTES
from megascale.ops.quantized import Quantized
from megascale.parallel.linear_gemms import HIGH_PRECISION_GEMMS, LinearGemms, Operand, WeightOperand
from megascale.record.label import Label

if TYPE_CHECKING:
    from megascale.comm.symmetric_memory import ScaledMatrix, SymmetricMemory
    from megascale.parallel.microbatch import MicroBatch


class LinearParams(NamedTuple):
    """Weight [n, k], sharded in one dimension, and bias [n] of a linear layer on this rank, and the layer's GEMMs."""

    weight: Tensor
    bias: Tensor | None = None
    gemms: LinearGemms = HIGH_PRECISION_GEMMS

    def of(self, batch: MicroBatch) -> LinearParams:
        """Return the layer with the GEMMs of a micro-batch."""
        return self._replace(gemms=self.gemms.of(batch))


@dataclass(frozen=True)
class TensorParallel:
    """The tp group and its communication settings.

    `sequence_parallel`: activations between layers are sharded along dimension 0. `overlap`: communicate during GEMMs.
    `symmetric_memory`: torch's fused operators, where peers map each other's memory. `gpu`: GEMMs run on a GPU and need
    many rows. `domino`: collectives are whole, and overlap with the other half of the micro-batch (`parallel.domino`).
    """

    group: Group
    sequence_parallel: bool = False
    overlap: bool = True
    symmetric_memory: SymmetricMemory | None = None
    gpu: bool = False
    domino: bool = False

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def index(self) -> int:
        return self.group.index

    @property
    def activations_sharded(self) -> bool:
        """True if a rank holds a shard [s / tp, b, h] of the activations between layers (sequence parallelism)."""
        return self.sequence_parallel and self.size > 1

    def gather(self, x: Tensor, label: Label, *, wait: bool = True) -> tuple[Tensor, Work]:
        """All-gather x [s / size, ...] along dimension 0; return x itself if activations are not sharded."""
        if not self.activations_sharded:
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
        """`gather` for a GEMM operand. Codes are gathered as bytes, after their scales."""
        if isinstance(x, Tensor):
            return self.gather(x, label, wait=wait)
        if not self.activations_sharded:
            return x, COMPLETED
        scale = self.gather_scale(x, label)
        codes, gathering = self.gather(x.codes, label, wait=wait)
        return x.gathered(codes, scale), gathering

    def gather_scale(self, x: Quantized, label: Label) -> Tensor:
        """Return the scales of the gathered x: all-gathered as bytes, unless one holds for the rows of all ranks."""
        if not x.scales_differ_by_row:
            return x.scale
        return self.gather(x.scale.view(torch.uint8), label.with_suffix("scales"))[0].view(x.scale.dtype)

    def fused_for(self, inputs: Sequence[Operand], weights: Iterable[Operand], rows: int) -> SymmetricMemory | None:
        """Return torch's fused operators if they can run these GEMMs, with `rows` rows per rank."""
        if (fused := self.symmetric_memory if self.activations_sharded and self.overlap else None) is None:
            return None
        operands = *inputs, *weights
        blocks = {x.block if isinstance(x, Quantized) else None for x in operands}
        integers = any(isinstance(x, Quantized) and x.data.dtype == torch.int8 for x in operands)
        if integers or not can_fuse(rows, len(inputs), blocks):
            return None
        return fused if blocks == {None} or fused.has_scaled_matmul() else None

    def num_pieces(self, shape: Sequence[int], nbytes: int) -> int:
        """Return the number of pieces into which the communication of a shard [s, b, k] is split; 0: one collective."""
        if not self.overlap or self.domino or self.group.p2p_transport is None:
            return 0
        pieces = max(1, min(MAX_PIECES, nbytes // MIN_PIECE_BYTES))
        on_gpu = max_pieces(shape[0], shape[1], self.size, self.activations_sharded)
        return min(pieces, on_gpu) if self.gpu else pieces


def all_gather_matmul(
    shard: Operand, weights: Sequence[WeightOperand], tp: TensorParallel, label: Label, dtype: torch.dtype,
    on_rows: Callable[[Operand, slice], None] | None = None,
    after_all_gather: Callable[[Operand], Operand] = lambda x: x,
    gathering: tuple[Operand, Work] | None = None,
) -> tuple[Operand, list[Tensor]]:  # fmt: skip
    """All-gather `shard` into X with sequence parallelism (X is `shard` without), and compute X W^T + b per weight.

    shard is [s / tp, b, k], or [s, b, k] without sequence parallelism. Returns X and the outputs [s, b, n] in `dtype`.
    Without weights X is gathered alike.
    `on_rows(X, rows)` is called when rows of X are complete: once for all rows, or first for this rank's own rows,
    during communication, and then for the remaining rows. `after_all_gather` turns gathered rows into a GEMM operand.
    `gathering`: X, which arrives already.
    """
    on_rows = on_rows or (lambda full, rows: None)
    pieces = tp.num_pieces(shard.shape, shard.nbytes) if tp.activations_sharded else 0
    operands = [weight.operand for weight in weights]
    fused = tp.fused_for([shard], operands, shard.shape[:-1].numel())
    if fused is not None and weights:
        full, outputs = _fused_all_gather_matmul(shard, operands, tp, fused, label, dtype)
        pairs = zip(outputs, weights, strict=True)
        outputs = [out if bias is None else out.add_(bias) for out, (_, bias, _) in pairs]
    elif fused is not None or not pieces:
        full, arriving = gathering or tp.gather_operand(shard, label)
        arriving.wait()
        x = after_all_gather(full) if weights else full
        outputs = [gemms.gemm(x, operand, bias, dtype) for operand, bias, gemms in weights]
    else:
        return _all_gather_matmul_pieces(shard, weights, tp, label, pieces, dtype, on_rows, after_all_gather)
    on_rows(full, slice(0, full.shape[0]))
    return full, outputs


def _fused_all_gather_matmul(
    shard: Operand, weights: Sequence[Operand], tp: TensorParallel, fused: SymmetricMemory, label: Label,
    dtype: torch.dtype,
) -> tuple[Operand, list[Tensor]]:  # fmt: skip
    if isinstance(shard, Tensor):
        matrices = [weight.t() for weight in weights if isinstance(weight, Tensor)]
        return fused.all_gather_matmul(shard.contiguous(), matrices, label=label)
    scale = tp.gather_scale(shard, label)
    scaled = [_scaled_matrix(weight) for weight in weights if isinstance(weight, Quantized)]
    data, outputs = fused.all_gather_scaled_matmul(shard.data, scale, scaled, dtype, label=label)
    return shard.gathered(data, scale), outputs


def _scaled_matrix(weight: Quantized) -> ScaledMatrix:
    """Transpose a weight [n, k] to the right-hand operand [k, n], and its scale, [] or [1, n] for per-row scales."""
    return weight.data.t(), weight.scale.t(), weight.use_fast_accum


def _all_gather_matmul_pieces(
    shard: Operand, weights: Sequence[WeightOperand], tp: TensorParallel, label: Label, pieces: int, dtype: torch.dtype,
    on_rows: Callable[[Operand, slice], None], after_all_gather: Callable[[Operand], Operand],
) -> tuple[Operand, list[Tensor]]:  # fmt: skip
    n = shard.shape[0]
    sent = shard.codes if isinstance(shard, Quantized) else shard.contiguous()
    received = sent.new_empty(n * tp.size, *sent.shape[1:])
    full: Operand = received
    if isinstance(shard, Quantized):
        full = shard.gathered(received, tp.gather_scale(shard, label))
    outputs = [received.new_empty(*full.shape[:-1], operand.shape[0], dtype=dtype) for operand, _, _ in weights]
    for number, (row_ranges, work) in enumerate(all_gather_pieces(tp.group, received, sent, pieces, label=label)):
        work.wait()
        for rows in row_ranges:
            x = after_all_gather(full[rows])
            for out, (operand, bias, gemms) in zip(outputs, weights, strict=True):
                gemms.gemm_out(out[rows], x, operand, bias)
        if number == 0:  # this rank's own rows
            on_rows(full, slice(n * tp.index, n * (tp.index + 1)))
    for rows in (slice(0, n * tp.index), slice(n * (tp.index + 1), n * tp.size)):
        if rows.start < rows.stop:
            on_rows(full, rows)
    return full, outputs


def matmul_reduce_scatter(
    inputs: Sequence[Operand], weights: Sequence[WeightOperand], tp: TensorParallel, label: Label, dtype: torch.dtype,
    *, wait: bool = True,
) -> tuple[Tensor, Work]:  # fmt: skip
    """Compute X W^T and reduce-scatter the sum over tp with sequence parallelism; all-reduce without.

    Several inputs [s, b, k] and weights [n, k]: the sum of their GEMMs is reduced once. The result, in `dtype`, is this
    rank's shard [s / tp, b, n], or [s, b, n] without sequence parallelism. Biases are left to the caller: added here,
    every rank would contribute its copy.
    """
    x, weight = inputs[0], weights[0].operand
    if (fused := tp.fused_for(inputs, [w.operand for w in weights], x.shape[:-1].numel() // tp.size)) is not None:
        return _fused_matmul_reduce_scatter(x, weight, fused, label, dtype), COMPLETED
    *tokens, n = *x.shape[:-1], weight.shape[0]
    shape = torch.Size([tokens[0] // tp.size if tp.sequence_parallel else tokens[0], *tokens[1:], n])  # of the result
    pieces = tp.num_pieces(shape, shape.numel() * dtype.itemsize)
    if not pieces:
        full = weights[0].gemms.gemm(x, weight, None, dtype)
        for layer_input, (operand, _, gemms) in zip(inputs[1:], weights[1:], strict=True):
            gemms.gemm_out(full, layer_input, operand, add=True)
        return tp.reduce(full, label, wait=wait)
    return _matmul_reduce_scatter_pieces(inputs, weights, tp, label, pieces, dtype), COMPLETED


def _fused_matmul_reduce_scatter(
    x: Operand, weight: Operand, fused: SymmetricMemory, label: Label, dtype: torch.dtype
) -> Tensor:
    if isinstance(x, Tensor) and isinstance(weight, Tensor):
        return fused.matmul_reduce_scatter(x, weight.t(), label=label)
    assert isinstance(x, Quantized) and isinstance(weight, Quantized), "both operands are FP8, or neither"
    return fused.scaled_matmul_reduce_scatter(x.data, x.scale, _scaled_matrix(weight), dtype, label=label)


def _matmul_reduce_scatter_pieces(
    inputs: Sequence[Operand], weights: Sequence[WeightOperand], tp: TensorParallel, label: Label, pieces: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    full = inputs[0].new_empty(*inputs[0].shape[:-1], weights[0].operand.shape[0], dtype=dtype)

    def compute_rows(rows: slice) -> None:
        for number, (layer_input, (operand, _, gemms)) in enumerate(zip(inputs, weights, strict=True)):
            gemms.gemm_out(full[rows], layer_input[rows], operand, add=number > 0)

    if tp.sequence_parallel:
        out = torch.empty_like(full[: full.shape[0] // tp.size])
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
