"""Fewer data-parallel ranks for the next attempt of a job that has lost a node and has no spare (`fault.shrink`).

The global batch stays, so a rank runs more micro-batches, and the loss curve is the same to rounding. Checkpoints on
storage load in any layout; copies in memory do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config.injection import faults_of_ranks
from megascale.config.loading import check_rules
from megascale.config.run import RunConfig
from megascale.config.world_rules import world_findings
from megascale.core.errors import ConfigError


@dataclass(frozen=True)
class SmallerLayout:
    """The layout of the next attempt. `nodes`: nodes with ranks; `inject`: the injected faults of ranks that remain,
    None for all; `overrides`: further `key=value` arguments.
    """

    dp: int
    world_size: int
    nodes: int
    inject: str | None = None

    @property
    def overrides(self) -> tuple[str, ...]:
        return (f"parallel.dp={self.dp}", *([] if self.inject is None else [f"fault.inject={self.inject}"]))


def smaller_layout(config: RunConfig, ranks_per_node: int, nodes: int) -> SmallerLayout | None:
    """Return the layout with the most data-parallel ranks that fits `nodes` nodes; None if no layout does.

    `config`: resolved, with the dp of the last attempt. Nodes are filled with `ranks_per_node` ranks; a job smaller
    than a node runs on one. The rest of the layout is unchanged, and dp must be legal with the global batch.
    """
    replica = config.parallel.replica_size
    for dp in range(min(config.dp - 1, nodes * ranks_per_node // replica), 0, -1):
        world_size = replica * dp
        fills_nodes = world_size % ranks_per_node == 0 or world_size < ranks_per_node
        inject = faults_of_ranks(config.fault.inject, world_size)
        if fills_nodes and _is_legal(config, dp, inject):
            nodes = -(-world_size // ranks_per_node)
            return SmallerLayout(dp, world_size, nodes, None if inject == config.fault.inject else inject)
    return None


def _is_legal(config: RunConfig, dp: int, inject: str) -> bool:
    parallel, fault = config.parallel.model_copy(update={"dp": dp}), config.fault.model_copy(update={"inject": inject})
    smaller = config.model_copy(update={"parallel": parallel, "fault": fault})
    try:
        check_rules(smaller, "fault.shrink")
    except ConfigError:
        return False
    return not list(world_findings(smaller, smaller.world_size))
