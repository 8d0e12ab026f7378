"""Averages of the weights for evaluation: they change nothing in training.

    ema    every `weight_average_every` steps  A = decay A + (1 - decay) W, begun with W
    lawa   the mean of the last `weight_average_count` snapshots, one every `weight_average_every` steps (Sanyal et al.
           2023, arXiv:2306.03241)

Each rank averages its shard of the master weights; an evaluation puts the average in place of the weights for a moment.
Checkpoints hold `average0.NAME`, and for lawa `average1.NAME`, ... by the weights' global names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.comm.totals import sum_over_job
from megascale.config.train import TrainConfig
from megascale.optim.optimizer_shard import OptimizerShard, gather_shares, global_tensors
from megascale.parallel.param_and_grad_buffers import ParamAndGradBuffers
from megascale.parallel.stateful import AVERAGE, AVERAGE_UPDATES, WEIGHTS, GlobalTensor


class WeightAverage:
    """The average of a run's weights; a part of the run with state (`Stateful`)."""

    def __init__(self, settings: TrainConfig, shards: Sequence[OptimizerShard], mesh: Mesh) -> None:
        self._settings = settings
        self._mesh = mesh
        self._averaged = [shard for shard in shards if not shard.bucket.frozen]
        count = settings.weight_average_count if settings.weight_average == "lawa" else 1
        names = [f"{AVERAGE}{index}" for index in range(count)]
        self._shards = [
            replace(shard, state={name: torch.zeros_like(shard.master_fp32) for name in names}, ranges=())
            for shard in self._averaged
        ]
        self._taken = 0
        self._saved = torch.zeros(1, dtype=torch.float64, device=shards[0].master.device)  # as `_taken`
        self._is_saved = False  # the checkpoint being loaded has an average
        self.begins_anew = False  # in a run whose checkpoint has none, or one of another kind

    @property
    def has_begun(self) -> bool:
        """True after the first update."""
        return self._taken > 0

    def update(self, step: int) -> None:
        """Average the weights after a step, if it is time."""
        if step % self._settings.weight_average_every:
            return
        for shard, averaged in zip(self._shards, self._averaged, strict=True):
            snapshots, weights = list(shard.state.values()), averaged.master_fp32
            if self._settings.weight_average == "lawa" or not self._taken:
                snapshots[self._taken % len(snapshots)].copy_(weights)
            else:
                snapshots[0].lerp_(weights, 1 - self._settings.weight_average_decay)
        self._taken += 1
        self._saved.fill_(self._taken)

    def mean(self, shard: OptimizerShard) -> Tensor:
        """Return the average of a shard."""
        snapshots = list(shard.state.values())[: self._taken]
        return torch.stack(snapshots).mean(0) if len(snapshots) > 1 else snapshots[0]

    @contextmanager
    def in_place_of_weights(self, buffers: ParamAndGradBuffers) -> Iterator[None]:
        """Put the average in place of the weights on all ranks, and the weights back at the end, bit for bit."""
        buffers.finish_param_gather()
        kept = [None if shard.has_own_master else shard.master.clone() for shard in self._shards]
        for shard in self._shards:
            shard.weights.copy_(self.mean(shard))
        _gather(buffers)
        yield
        for shard, master in zip(self._shards, kept, strict=True):
            if master is not None:
                shard.master.copy_(master)
            shard.copy_to_params()
        _gather(buffers)

    def global_tensors(self) -> dict[str, GlobalTensor]:
        tensors = global_tensors(self._shards, self._mesh)
        averages = {name: tensor for name, tensor in tensors.items() if not name.startswith(WEIGHTS)}
        return averages | {AVERAGE_UPDATES: GlobalTensor.whole(self._saved)}

    def flat_tensors(self) -> list[Tensor]:
        return [*(values for shard in self._shards for values in shard.state.values()), self._saved]

    def begin_load(self, saved: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, GlobalTensor]:
        """Read the average; begin anew with a checkpoint of a run without, of another kind or number of snapshots."""
        tensors = self.global_tensors()
        self._is_saved = AVERAGE_UPDATES in saved and _kind(config.get("train", {})) == _kind(dict(self._settings))
        self.begins_anew = not self._is_saved
        self._saved.zero_()
        if self._is_saved and self._mesh.rank:
            del tensors[AVERAGE_UPDATES]  # the first rank reads it
        return tensors if self._is_saved else {}

    def end_load(self) -> None:
        if self._is_saved:
            sum_over_job(self._mesh, self._saved)
            gather_shares(self._shards)
        self.end_restore()

    def end_restore(self) -> None:
        self._taken = int(self._saved.item())


def _kind(settings: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return what a saved average is of, from the keys of `[train]`: frozen weights have none."""
    kind = settings.get("weight_average")
    return kind, settings.get("weight_average_count") if kind == "lawa" else 1, settings.get("freeze", [])


def _gather(buffers: ParamAndGradBuffers) -> None:
    for bucket in buffers.trained:
        buffers.start_param_gather(bucket)
    buffers.finish_param_gather()
