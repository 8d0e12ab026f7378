"""The squared norm of the gradient of the first micro-batch of every data-parallel rank in a step.

    begin               before a step that measures
    Bucket              hands its main gradient to `_read` after the chunk's first backward, before any reduction
    local_sq_norm       after all reductions; a collective

No backward is added: the main gradient of a bucket holds one micro-batch until the second backward of its chunk, or its
reduction. A measurement is one pass over the main gradients. What is partial on a rank is copied, and summed at the end
of the step: with sequence parallelism the gradients of experts and of parameters that tp replicates, QK-norm gradients
always, and the two ends of a tied embedding, which then need the memory of a second gradient. Ranks that share
sequences along cp sum a copy of each bucket at once, and the first of them counts it. With ep > 1 the gradients of
experts are of the tokens of several data-parallel ranks: `config.exclusions` allows no measurement.

A schedule that runs a second forward of the last stage before its first backward mixes micro-batches in the gradient of
the head, which the fused loss computes in forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh
from megascale.optim.clipping import sum_of_squares
from megascale.parallel.bucket import Bucket


class FirstGradient:
    """Reads gradients of the first micro-batches. `sequence`: with sequence parallelism."""

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, device: torch.device, *, sequence: bool) -> None:
        self._buckets = buckets
        self._tp = mesh.tp
        self._sharing = [group for group in (mesh.cp_heads, mesh.cp_keys) if group.size > 1]
        self._counts = mesh.coord.cp == 0
        self._sequence = sequence
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._partial_over_tp: list[Tensor] = []  # in the order of the buckets' first backwards
        self._tied: list[tuple[Bucket, Tensor]] = []

    def begin(self) -> None:
        """Read the gradients of the next step."""
        self._total.zero_()
        for bucket in self._buckets:
            bucket.grad_reader = self._read

    def local_sq_norm(self) -> Tensor:
        """Compute this rank's part of the sum, over data-parallel ranks, of squared norms: an f64 device scalar.

        Over the job, every parameter counts once on each data-parallel rank. A collective of all ranks.
        """
        total = self._total.clone()
        if self._partial_over_tp:
            vectors = torch.cat(self._partial_over_tp)
            all_reduce(self._tp, vectors, label="first gradient")
            if self._tp.index == 0:
                total += sum_of_squares(vectors)
        for bucket, full in self._tied:
            all_reduce(bucket.tied_group, full, label="first gradient")
            if bucket.tied_group.index == 0:
                total += sum_of_squares(full)
        self._partial_over_tp.clear()
        self._tied.clear()
        return total if self._counts else torch.zeros_like(total)

    def _read(self, bucket: Bucket, full: Tensor) -> None:
        """Add the squared norm of a bucket's main gradient `full` [size], and keep copies of what is partial."""
        if self._sharing:
            full = full.clone()
            for group in self._sharing:
                all_reduce(group, full, label="first gradient")
        if bucket.tied_group.size > 1:
            self._tied.append((bucket, full.clone()))
            return
        layout = bucket.layout
        low, high = (0, layout.numel) if layout.has_experts else layout.replicated
        partial = (low, high) if layout.has_experts else layout.summed_over_tp(self._sequence)
        partial = partial if self._tp.size > 1 else (low, low)
        self._total += sum_of_squares(full[:low])
        if partial[0] < partial[1]:
            self._partial_over_tp.append(full[slice(*partial)].clone())
        if self._tp.index == 0:
            self._total += sum_of_squares(full[partial[1] : high])
