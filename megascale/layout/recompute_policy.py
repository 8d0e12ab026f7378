"""Activation memory: the parts of a layer's forward that the backward recomputes instead of saving, and where the
tensors that it saves are meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megascale.catalog.schedules import SCHEDULES
from megascale.config.parallel import ParallelConfig
from megascale.config.train import LayerPolicy, TrainConfig
from megascale.layout.stages import Stages


@dataclass(frozen=True)
class RecomputePolicy:
    """The recomputed parts of a block. `full`: the entire block, from its input. Otherwise any of `attention`, the
    attention core; `norm` and `activation`, whose outputs the next linear layer would save as its input. With several
    `mlp_tiles` also the MLP, tile by tile. `offload`: the inputs of entire blocks are kept in host memory.

    `store`: where the tensors that a block saves are between forward and backward. In host memory or files there are
    also those of the first `stored_tiles` of the MLP, a `share` of all, which are not recomputed.
    """

    full: bool = False
    attention: bool = False
    norm: bool = False
    activation: bool = False
    mlp_tiles: int = 1
    offload: bool = False
    store: Literal["device", "host", "nvme"] = "device"
    share: float = 1.0

    @property
    def moves(self) -> bool:
        """True if saved tensors leave the device."""
        return self.store != "device"

    @property
    def kept_in(self) -> str:
        """The store of saved tensors, or of block inputs: device, host or nvme."""
        return "host" if self.offload else self.store

    @property
    def stored_tiles(self) -> int:
        return round(self.share * self.mlp_tiles) if self.moves and self.mlp_tiles > 1 else 0

    @property
    def whole(self) -> bool:
        """True if the block runs at once, not by turns with other work, and each W follows its I: between them its
        tensors are on the device.
        """
        return self.full or self.moves


NO_RECOMPUTE = RecomputePolicy()

STAYS = 16
"""A saved tensor of fewer bytes than the block's input divided by this stays on the device."""


def joined_chunks(train: TrainConfig, parallel: ParallelConfig, layout: Stages) -> tuple[int, ...]:
    """The model chunks whose W follows its I at once (`schedule.ir.weights_at_once`): of a schedule with split
    backwards, those with a block that is recomputed or moved as a whole, on any pipeline rank.
    """
    if parallel.schedule is None or not SCHEDULES[parallel.schedule].facts["split"]:
        return ()
    whole = {
        chunk
        for index, (_, chunk) in enumerate(layout.placement.places)
        if any(recompute_policy(train, chunk, layer).whole for layer in layout.layers(index))
    }
    return tuple(sorted(whole))


def recompute_policy(train: TrainConfig, chunk: int, layer: int) -> RecomputePolicy:
    """The policy of a layer, in model chunk `chunk` of its pipeline rank; before the planner's choice as kept."""
    kept = replace(NO_RECOMPUTE, mlp_tiles=train.mlp_tiles)
    if isinstance(train.memory, list):
        return _of_layer(train, kept, train.memory[layer % len(train.memory)])
    if train.recompute == "none" or chunk not in (train.recompute_model_chunks or [chunk]):
        return kept
    if train.recompute == "full":
        return replace(kept, full=True, offload=train.activation_offload)
    return _selective(train, kept)


def _of_layer(train: TrainConfig, kept: RecomputePolicy, policy: LayerPolicy) -> RecomputePolicy:
    if isinstance(policy, Mapping):
        ((store, share),) = policy.items()
        return replace(kept, store=store, share=share)
    match policy:
        case "full":
            return replace(kept, full=True)
        case "selective":
            return _selective(train, kept)
        case "host" | "nvme":
            return replace(kept, store=policy)
    return kept


def _selective(train: TrainConfig, kept: RecomputePolicy) -> RecomputePolicy:
    names = train.recompute_ops or ["attention"]
    return replace(kept, attention="attention" in names, norm="norm" in names, activation="activation" in names)
