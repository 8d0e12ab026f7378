"""What of a model chunk's forward is computed again in the backward instead of being kept."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config.train import TrainConfig


@dataclass(frozen=True)
class Recompute:
    """`full`: all of a block, from its input. Otherwise some of `attention`, the core from q, k and v to what the heads
    attend to, and `norm` and `activation`, which the linear layer that follows would keep as its input.
    """

    full: bool = False
    attention: bool = False
    norm: bool = False
    activation: bool = False


NOTHING = Recompute()


def recompute_of(train: TrainConfig, chunk: int) -> Recompute:
    """What `chunk` of any rank computes again."""
    if train.recompute == "none" or chunk not in (train.recompute_chunks or [chunk]):
        return NOTHING
    if train.recompute == "full":
        return Recompute(full=True)
    return Recompute(**dict.fromkeys(train.recompute_ops or ["attention"], True))
