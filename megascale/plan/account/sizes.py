"""Sizes that several formulas share: of elements, of replicated buckets, and of messages between stages."""

from __future__ import annotations

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.topology import DATA_AXES, topology_of


def element_bytes(precision: str) -> tuple[int, int]:
    """Element sizes in bytes of the compute and the accumulation dtype."""
    facts = PRECISIONS[precision].facts
    return int(facts["compute_bytes"]), int(facts["accumulate_bytes"])


def replicas(config: RunConfig) -> int:
    """Count the ranks with replicas of a bucket, over data and context parallelism."""
    return topology_of(config).size(*DATA_AXES)


def message_bytes(config: RunConfig) -> int:
    """Size a point-to-point message between stages: 1 / tp of an activation."""
    compute, _ = element_bytes(config.train.precision)
    return config.row_tokens * config.batch.micro * config.model.hidden_size * compute // config.parallel.tp
