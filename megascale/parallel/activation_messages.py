"""The messages between pipeline stages: activations and their gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megascale.comm.collectives import all_gather
from megascale.comm.group import Group, single_rank_group
from megascale.parallel.tp_overlap import TensorParallel
from megascale.record.label import Label


@dataclass(frozen=True)
class P2PActivationSpec:
    """Format of the activations, and of their gradients, that stages send: `shape`, `dtype`, and split over `tp`.

    Without sequence parallelism `shape` is [s, b, h], and the tp ranks hold replicas: a rank sends 1 / tp of the
    activation, and the receivers all-gather the shards (the scatter/gather optimization, Narayanan et al. 2021, 4.1).
    With sequence parallelism a rank sends all of its shard, `shape` [s / tp, b, h], and `tp` is a single-rank group.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    tp: Group

    @classmethod
    def of(
        cls, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, tp: TensorParallel
    ) -> P2PActivationSpec:
        """Return the format of activations of `shape` [s, b, h] on this rank."""
        if not tp.sequence_parallel:
            return cls(shape, dtype, device, tp.group)
        rows, batch, width = shape
        return cls((rows // tp.size, batch, width), dtype, device, single_rank_group("tp"))

    def with_rows(self, rows: int | None) -> P2PActivationSpec:
        """Return the format for a micro-batch of one row of `rows` tokens; None: this format."""
        return self if rows is None else replace(self, shape=(rows, 1, self.shape[2]))

    def receive_buffer(self) -> Tensor:
        """Allocate a flat buffer for this rank's shard."""
        return torch.empty(math.prod(self.shape) // self.tp.size, dtype=self.dtype, device=self.device)

    def local_shard(self, full: Tensor) -> Tensor:
        """This rank's shard of an activation, contiguous and flat."""
        return full.contiguous().view(self.tp.size, -1)[self.tp.index]

    def gather_full(self, shard: Tensor, label: Label) -> Tensor:
        """All-gather the received shards into the activation [s, b, h]; with a single-rank group only reshape."""
        if self.tp.size > 1:
            full = shard.new_empty(self.tp.size * shard.numel())  # flat: gloo requires this
            all_gather(self.tp, full, shard, label=label)
            shard = full
        return shard.view(self.shape)
