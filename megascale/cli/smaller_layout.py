"""Fewer data-parallel ranks for the next attempt of a job that has lost a node and has no spare (`fault.shrink`).

The global batch stays, so a rank runs more micro-batches, and the loss curve is the same to rounding. Checkpoints on
storage load in any layout; copies in memory do not.
"""

from __future__ import annotations

import contextlib
import math

from megascale.config.injection import faults_of_ranks
from megascale.config.loading import check_rules
from megascale.config.run import RunConfig
from megascale.config.world_rules import world_findings
from megascale.core.errors import ConfigError
from megascale.operate.driver.job_state import SmallerLayout


def smaller_layout(config: RunConfig, ranks_per_node: int, nodes: int) -> SmallerLayout | None:
    """Return the layout with the most data-parallel ranks that fits `nodes` nodes; None if no layout does.

    `config`: resolved, with the dp of the last attempt. Nodes are filled with `ranks_per_node` ranks; a job smaller
    than a node runs on one. The rest of the layout is unchanged but for the injected faults of ranks that it lacks, and
    for an ep that divides the ranks of a stage no more; dp must be legal with the global batch.
    """
    replica = config.parallel.replica_size
    for dp in range(min(config.dp - 1, nodes * ranks_per_node // replica), 0, -1):
        world_size = replica * dp
        if world_size % ranks_per_node and world_size > ranks_per_node:  # it does not fill nodes
            continue
        inject = faults_of_ranks(config.fault.inject, world_size)
        ep = math.gcd(config.parallel.ep, world_size // config.parallel.pp)
        smaller = config.changed(parallel={"dp": dp, "ep": ep}, fault={"inject": inject})
        with contextlib.suppress(ConfigError):
            check_rules(smaller, "fault.shrink")
            if not list(world_findings(smaller, world_size)):
                overrides = [f"parallel.dp={dp}"]
                overrides += [] if ep == config.parallel.ep else [f"parallel.ep={ep}"]
                overrides += [] if inject == config.fault.inject else [f"fault.inject={inject}"]
                return SmallerLayout(-(-world_size // ranks_per_node), world_size, tuple(overrides))
    return None
