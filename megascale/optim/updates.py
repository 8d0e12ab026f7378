"""The common part of the updates of all units of work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.config.train import OptimizerConfig
from megascale.device import HostBuffers
from megascale.layout.param_groups import ParamGroups
from megascale.ops.optimizer import Rule
from megascale.optim.clipping import Clipping
from megascale.optim.compensated import KeptUpdates
from megascale.optim.optimizer_shard import OptimizerShard
from megascale.parallel.bucket import Bucket

if TYPE_CHECKING:
    from megascale.layout.owners import OwnedMatrix

Rules = Mapping[str, Rule]
"""The rules of all groups by name."""


@dataclass(frozen=True)
class Parts:
    """The parts of updates: this rank's shards, and the groups of parameters with their rules by name. `kept`: of
    compensated weights; `host`: the memory of state on the host.
    """

    shards: Sequence[OptimizerShard]
    mesh: Mesh
    config: OptimizerConfig
    groups: ParamGroups
    rules: Rules
    kept: KeptUpdates | None = None
    host: HostBuffers | None = None


class Updates(ABC):
    """The updates, in all shards, of the parameters whose rules have one unit of work. `writes_rounded`: `apply` also
    rounds the master weights of all shards into the buckets' weights.
    """

    writes_rounded = False

    @abstractmethod
    def __init__(self, parts: Parts) -> None: ...

    def compute(self, lr: float, step: int, clipping: Clipping) -> None:  # noqa: B027  most rules need no more than a shard
        """Compute what takes more than a shard. A collective of all ranks. `step` counts from 1."""

    @abstractmethod
    def apply(self, index: int, lr: float, step: int, clipping: Clipping) -> None:
        """Update the master weights and state in shard `index`, unless the step is skipped; after `compute`."""

    def matrix_state(self) -> Iterator[tuple[Bucket, OwnedMatrix, str, Tensor]]:
        """Yield the state of whole matrices that this rank owns: bucket, matrix, name and values."""
        return iter(())

    def end_restore(self) -> None:  # noqa: B027
        """Take note that the state has been loaded."""
