"""What an optimizer is given and what it must offer, so that the sharding layer need not know it.

An optimizer sees its shard as flat segments, cut anywhere, so its rule must be element-wise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megascale.config.train import OptimizerConfig


@dataclass(frozen=True)
class Segment:
    """A flat run of weights that are treated alike: `weight`, `grad` and each of `state` are [n] views of one
    format.
    """

    weight: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    decays: bool


class Optimizer(Protocol):
    """An update rule over segments. `state_names`: the tensors it keeps for each segment, zero at the start."""

    state_names: tuple[str, ...]

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None: ...

    def step(self, lr: float, step: int, skip: Tensor) -> None:
        """Update all segments from their gradients; `step` counts from 1. `skip`, an f32 scalar on the device: nothing
        is changed where it is 1.
        """
