"""Activation recomputation: the parts of a model chunk's forward that the backward recomputes instead of saving."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def recomputed_chunks(train: TrainConfig, vpp: int) -> list[int]:
    """The model chunks whose blocks are recomputed as a whole."""
    return [chunk for chunk in range(vpp) if recompute_policy(train, chunk).full]


def recompute_policy(train: TrainConfig, chunk: int) -> RecomputePolicy:
    """The policy of model chunk `chunk`, the same on every pipeline rank."""
    if train.recompute == "none" or chunk not in (train.recompute_model_chunks or [chunk]):
        return RecomputePolicy(mlp_tiles=train.mlp_tiles)
    if train.recompute == "full":
        return RecomputePolicy(full=True, mlp_tiles=train.mlp_tiles, offload=train.activation_offload)
    return replace(NO_RECOMPUTE, mlp_tiles=train.mlp_tiles, **dict.fromkeys(train.recompute_ops or ["attention"], True))
