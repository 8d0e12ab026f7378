"""Activation recomputation: the parts of a model chunk's forward that the backward recomputes instead of saving."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megascale.catalog.schedules import SCHEDULES
from megascale.config.parallel import ParallelConfig
from megascale.config.train import TrainConfig


@dataclass(frozen=True)
class RecomputePolicy:
    """The recomputed parts of a block. `full`: the entire block, from its input. Otherwise any of `attention`, the
    attention core; `norm` and `activation`, whose outputs the next linear layer would save as its input. With several
    `mlp_tiles` also the MLP, tile by tile. `offload`: the inputs of entire blocks are kept in host memory.
    """

    full: bool = False
    attention: bool = False
    norm: bool = False
    activation: bool = False
    mlp_tiles: int = 1
    offload: bool = False


NO_RECOMPUTE = RecomputePolicy()


def joined_chunks(train: TrainConfig, parallel: ParallelConfig) -> tuple[int, ...]:
    """The model chunks whose W follows its I at once (`schedule.ir.weights_at_once`): of a schedule with split
    backwards, those whose blocks are recomputed as a whole.
    """
    splits = parallel.schedule is not None and SCHEDULES[parallel.schedule].facts["split"]
    return tuple(chunk for chunk in range(parallel.vpp if splits else 0) if recompute_policy(train, chunk).full)


def recompute_policy(train: TrainConfig, chunk: int) -> RecomputePolicy:
    """The policy of model chunk `chunk`, the same on every pipeline rank."""
    if train.recompute == "none" or chunk not in (train.recompute_model_chunks or [chunk]):
        return RecomputePolicy(mlp_tiles=train.mlp_tiles)
    if train.recompute == "full":
        return RecomputePolicy(full=True, mlp_tiles=train.mlp_tiles, offload=train.activation_offload)
    return replace(NO_RECOMPUTE, mlp_tiles=train.mlp_tiles, **dict.fromkeys(train.recompute_ops or ["attention"], True))
