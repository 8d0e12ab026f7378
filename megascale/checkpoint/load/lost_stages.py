"""Lost pipeline stages, rebuilt from their neighbours where no intact state is recent (`fault.rebuild_stage`).

    W[layer j of stage s] = share[s - 1] W[layer j of stage s - 1] + share[s + 1] W[layer j of stage s + 1]

The shares are in proportion to the gradient norms of the two stages (CheckFree; Blagoev et al. 2025, arXiv:2506.15461,
and their code), here the roots of the sums of `exp_avg_sq`, a running mean. The lost stage's `exp_avg_sq` is the same
mean of its neighbours', because bias corrections do not begin anew; its other optimizer state begins at zero. The other
stages keep every bit, as does what all ranks have in common: counters, histories, the order of samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megascale.checkpoint.format.state import slices
from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh
from megascale.comm.totals import sum_over_job
from megascale.config.model import ModelConfig
from megascale.layout.parameters import layer_params
from megascale.layout.stages import Placement
from megascale.layout.tensors import TensorSpec
from megascale.layout.topology import STAGE_AXES, Topology
from megascale.parallel.stateful import WEIGHTS, Stateful

SECOND_MOMENT = "exp_avg_sq."  # prefix of the names of the running means of squared gradients

Shares = Mapping[int, tuple[float, float]]
"""By rebuilt virtual stage, the shares of the stages before and after it."""


def lost_stages(ranks: Collection[int], topology: Topology, placement: Placement) -> list[int]:
    """Return the virtual stages of the pipeline ranks that `ranks` are of: a stage is lost with any of its ranks."""
    lost = {topology.coord(rank).pp for rank in ranks}
    return sorted(stage for pp_rank in lost for stage in placement.stages[pp_rank])


def can_rebuild(lost: Sequence[int], placement: Placement) -> bool:
    """Return True if every lost stage has two neighbours, none of them lost. So the first and the last stage, with
    embedding and head, are not rebuilt.
    """
    ends = 0, placement.count - 1
    return not any(stage in ends or stage - 1 in lost or stage + 1 in lost for stage in lost)


def rebuild_stages(lost: Sequence[int], model: ModelConfig, parts: Sequence[Stateful], mesh: Mesh) -> Shares:
    """Rebuild the state of `lost` stages in the `parts` of a run, of which all other stages have theirs. All ranks call
    it, and every stage has as many layers. Buffers in f64 hold a few times the largest tensor of a layer.
    """
    own = set(mesh.placement.stages[mesh.coord.pp])
    is_lost = not own.isdisjoint(lost)
    sharded = [part for part in parts if any(name.startswith(WEIGHTS) for name in part.global_tensors())]
    common = [flat for part in parts if part not in sharded for flat in part.flat_tensors() if flat.numel()]
    for flat in (flat for part in sharded if is_lost for flat in part.flat_tensors()):
        flat.zero_()
    for flat in common:  # equal on all ranks
        values = torch.zeros_like(flat) if mesh.rank else flat.clone()
        sum_over_job(mesh, values, label="state of a lost stage")
        if is_lost:
            flat.copy_(values)
    rebuilding = _Rebuilding(model, sharded, mesh, own)
    shares = {stage: rebuilding.rebuild(stage) for stage in lost}
    for part in sharded:
        part.end_load()  # replicas of a shard have written shares of it
    return shares


class _Rebuilding:
    """Means of the layers of stages. `own`: the virtual stages of this rank, of whose tensors `parts` have shards."""

    def __init__(self, model: ModelConfig, parts: Sequence[Stateful], mesh: Mesh, own: Collection[int]) -> None:
        self._model, self._own = model, own
        self._layers = model.num_layers // mesh.placement.count
        self._stage, self._pipeline = mesh.group(*STAGE_AXES), mesh.group("pp")
        tensors = (part.global_tensors() for part in parts)
        self._shards = {name: tensor.shards for named in tensors for name, tensor in named.items()}
        self._device = parts[0].flat_tensors()[0].device

    def rebuild(self, stage: int) -> tuple[float, float]:
        """Rebuild a stage. Returns the shares of the stages before and after it."""
        neighbours = stage - 1, stage + 1
        norms = torch.zeros(2, dtype=torch.float64, device=self._device)
        for index, neighbour in enumerate(neighbours):
            for tensor in self._tensors(neighbour) if neighbour in self._own else ():
                norms[index] += self._whole(SECOND_MOMENT, tensor).sum()
        all_reduce(self._pipeline, norms, label="gradient norms of stages")
        before, after = norms.sqrt().tolist()
        share = before / (before + after) if before + after else 0.5
        for kind in (WEIGHTS, SECOND_MOMENT):
            for lost, *pair in zip(*map(self._tensors, (stage, *neighbours)), strict=True):
                mean = torch.zeros(lost.shape, dtype=torch.float64, device=self._device)
                for neighbour, tensor, part in zip(neighbours, pair, (share, 1 - share), strict=True):
                    if neighbour in self._own:
                        mean += part * self._whole(kind, tensor)
                all_reduce(self._pipeline, mean, label="mean of stages")
                for shard in self._shards.get(kind + lost.name, ()):
                    shard.data.copy_(mean[slices(shard.offset, shard.size)])
        return share, 1 - share

    def _tensors(self, stage: int) -> Iterator[TensorSpec]:
        """Yield the tensors of a stage's layers, in an order that is the same for all stages."""
        for layer in range(stage * self._layers, (stage + 1) * self._layers):
            for parameter in layer_params(self._model, layer):
                yield from parameter.parts

    def _whole(self, kind: str, tensor: TensorSpec) -> Tensor:
        """Assemble a tensor of this rank's stage, f64, on all ranks of the stage, of which several may have a part."""
        sums = torch.zeros((2, *tensor.shape), dtype=torch.float64, device=self._device)
        for shard in self._shards.get(kind + tensor.name, ()):
            region = slices(shard.offset, shard.size)
            sums[0][region] += shard.data
            sums[1][region] += 1
        all_reduce(self._stage, sums, label="layers of a stage")
        return sums[0] / sums[1]
