"""Activation memory: the parts of a layer's forward that the backward recomputes instead of saving, and where the
tensors that it saves are meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
    `mlp_tiles` also the MLP, tile by tile, but for the first `stored_tiles`.

    `store`: where the tensors that a block saves are between forward and backward.
    """

    full: bool = False
    attention: bool = False
    norm: bool = False
    activation: bool = False
    mlp_tiles: int = 1
    stored_tiles: int = 0
    store: Literal["device", "host", "nvme"] = "device"

    @property
    def whole(self) -> bool:
        """True if the block runs at once, not by turns with other work, and each W follows its I: between them its
        tensors are on the device.
        """
        return self.full or self.store != "device"


NO_RECOMPUTE = RecomputePolicy()

STAYS = 16
"""A saved tensor of fewer bytes than the block's input divided by this stays on the device."""


def joined_chunks(train: TrainConfig, parallel: ParallelConfig, layout: Stages) -> tuple[int, ...]:
    """The model chunks whose W follows its I at once (`schedule.ir.weights_at_once`): of a schedule with split
    backwards, those with a block that is recomputed or moved as a whole, on any pipeline rank.
    """
    split = parallel.schedule is not None and SCHEDULES[parallel.schedule].facts["split"]
    whole = {
        chunk
        for index, (_, chunk) in enumerate(layout.placement.places if split else ())
        if any(recompute_policy(train, layer).whole for layer in layout.layers(index))
    }
    return tuple(sorted(whole))


def recompute_policy(train: TrainConfig, layer: int) -> RecomputePolicy:
    """The policy of a layer; before the planner's choice as kept."""
    policy: LayerPolicy = "keep"
    if isinstance(train.memory, list):
        policy = train.memory[layer % len(train.memory)]
    elif train.recompute != "none":
        policy = train.recompute
    name, share = (policy, 1.0) if isinstance(policy, str) else next(iter(policy.items()))
    kept = replace(NO_RECOMPUTE, mlp_tiles=train.mlp_tiles)
    match name:
        case "full" | "full_host":
            return replace(kept, full=True, store="host" if name == "full_host" else "device")
        case "selective":
            ops = train.recompute_ops or ["attention"]
            return replace(kept, attention="attention" in ops, norm="norm" in ops, activation="activation" in ops)
        case "host" | "nvme":
            return replace(kept, store=name, stored_tiles=round(share * train.mlp_tiles))
    return kept


def describe_policies(policies: Sequence[LayerPolicy], layers: int) -> str:
    """Describe the policies of all layers, such as 'layers 0-3 full, 4-7 keep', or 'host, keep by turns'."""
    names = [each if isinstance(each, str) else "{} {:g}".format(*next(iter(each.items()))) for each in policies]
    if 1 < len(names) < layers:
        return f"{', '.join(names)} by turns"
    runs, begin = list[str](), 0
    for name, same in itertools.groupby(itertools.islice(itertools.cycle(names), layers)):
        last = begin + len(list(same)) - 1
        runs.append(f"{begin}{f'-{last}' if last > begin else ''} {name}")
        begin = last + 1
    return f"layers {', '.join(runs)}"
