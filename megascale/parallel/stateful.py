"""`Stateful`: a part of a run that changes in training and is saved, as named global tensors of any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

WEIGHTS = "weights."  # prefix of the names of weights
AVERAGE = "average"  # prefix of the averages of weights, before a number and a dot (`train.weight_average`)
BALANCE_BIAS = "balance_bias"  # name of the experts' biases [layers x experts], f64 (`model.balance_bias`)
AVERAGE_UPDATES = "average_updates"  # name of the number of updates or snapshots of an average so far [1], f64


@dataclass(frozen=True)
class TensorShard:
    """A rectangular shard of a global tensor (a chunk in torch.distributed.checkpoint): `data` [size] at `offset`.

    `data` is a view of this rank's memory.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    data: Tensor


@dataclass
class GlobalTensor:
    """Global shape and dtype of a named tensor, and the shards of the tensor on this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: list[TensorShard]

    @classmethod
    def whole(cls, values: Tensor) -> GlobalTensor:
        """Return a tensor that this rank has all of."""
        shape = tuple(values.shape)
        return cls(shape, values.dtype, [TensorShard((0,) * len(shape), shape, values)])


class Stateful(Protocol):
    """A part of a run with state. The shards of all ranks together cover each global tensor; ranks may have copies."""

    def global_tensors(self) -> dict[str, GlobalTensor]:
        """Return views of the tensors that this rank saves, by global name."""

    def flat_tensors(self) -> list[Tensor]:
        """Return the contiguous tensors that hold all of the shards: the memory that a snapshot copies."""

    def begin_load(self, saved: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, GlobalTensor]:
        """Return the tensors that this rank reads of a checkpoint with the tensors `saved` (shapes by name), of a run
        with the resolved configuration `config`. State that is none of the model's may begin afresh where it is not
        saved.
        """

    def end_load(self) -> None:
        """Complete the state on every rank after the reads. A collective of all ranks."""

    def end_restore(self) -> None:
        """Take note that each rank's flat tensors have been copied back, from copies in memory."""
