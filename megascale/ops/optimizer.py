"""The step of an optimizer: what an update rule is given, what it must offer, and torch's rules.

A rule sees a shard as flat segments, cut anywhere. It is element-wise, or it scales its updates by norms of whole
parameters: the card's `needs` says which (`catalog.optimizers`), and the sharding layer need not know more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.config.train import OptimizerConfig
from megascale.ops.select import Backend, Setting


@dataclass(frozen=True)
class Segment:
    """A flat run of weights that are treated alike: `weight`, `grad` and each of `state` are [n] views of one dtype.

    `is_matrix`: they are of matrices, to which trust ratios apply. `weight_decay`: weight decay applies.
    """

    weight: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    is_matrix: bool
    weight_decay: bool


class Elementwise(Protocol):
    """A rule that treats each element by itself (needs = "elements"); its segments span several parameters.

    `state_names`: the tensors it keeps for each segment, zero at the start.
    """

    state_names: tuple[str, ...]

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None: ...

    def step(self, lr: float, step: int, factor: Tensor, skip: Tensor) -> None:
        """Update all segments from `factor` times their gradients, which are not read again; `step` counts from 1.
        `factor`, f64, and `skip`, f32, are scalars on the device: nothing is changed where `skip` is 1.
        """


class Normwise(Protocol):
    """A rule that wants norms of whole parameters (needs = "norms"), in two phases with a reduction between them; a
    segment is what a shard has of one parameter.
    """

    state_names: tuple[str, ...]

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None: ...

    def direct(self, step: int, skip: Tensor) -> None:
        """Update the state, and write over each gradient, which is clipped already, the direction of its update; `step`
        and `skip` as above.
        """

    def apply(self, lr: float, norms: Tensor, skip: Tensor) -> None:
        """Update the weights along the directions, which are not used again. `norms` [2, n], f64: of weights and of
        directions, of the parameters that the n segments of matrices are parts of.
        """


class TorchOptimizer(Backend):
    """The rules of the catalog, ours and those that other packages register."""

    def build(self, setting: Setting) -> type[Any]:
        """An `Elementwise` or a `Normwise`."""
        return OPTIMIZERS[setting.optimizer].load()
