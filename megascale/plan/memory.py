"""Bytes that a rank's weights, gradients and optimizer take: exact, from the layout of its buckets.

For N parameters on a rank, c bytes in the format of compute and a in that of accumulation, over d data-parallel ranks
with zero sharding (Rajbhandari et al. 2020): weights c N; gradients a N, with zero = 2 a N / d; optimizer (k + master)
a N, divided by d with zero >= 1, for k state tensors and a master copy where the two formats differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.buckets import pack
from megascale.layout.chunks import chunk_buckets
from megascale.layout.tensors import Parameter


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank. `transient`: the whole gradients that exist during a backward with zero = 2, one that is
    computed and, if reductions are overlapped, one that is reduced.
    """

    weights: int
    gradients: int
    optimizer: int
    transient: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.transient


def state_bytes(config: RunConfig, pp_rank: int) -> StateBytes:
    """Bytes of weights, gradients and optimizer on a rank of pipeline stage `pp_rank`, of a resolved configuration."""
    facts = PRECISIONS[config.train.precision].facts
    compute, accumulate = facts["compute_bytes"], facts["accumulate_bytes"]
    tensors = OPTIMIZERS[config.optimizer.name].facts["state"] + (1 if facts["master"] else 0)
    shards, zero = config.dp * config.parallel.cp, config.parallel.zero
    sizes = [sum(_sizes(chunk, config.parallel.tp, shards)) for chunk in chunk_buckets(config, pp_rank)]
    n = sum(sizes)
    return StateBytes(
        weights=compute * n,
        gradients=accumulate * (n // shards if zero == 2 else n),
        optimizer=tensors * accumulate * (n // shards if zero else n),
        transient=accumulate * max(sizes) * (2 if config.overlap.dp else 1) if zero == 2 else 0,
    )


def fullest_rank(config: RunConfig) -> StateBytes:
    """The state of the rank that holds most, of a resolved configuration."""
    return max((state_bytes(config, rank) for rank in range(config.parallel.pp)), key=lambda state: state.total)


def _sizes(chunk: list[list[Parameter]], tp: int, shards: int) -> Iterator[int]:
    return (pack(bucket, tp, shards).size for bucket in chunk)
