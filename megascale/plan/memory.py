"""Bytes that a rank's weights, gradients and optimizer take, exact, from the layout of its buckets; and with what
`plan.activations` and `plan.peak` say, a rank's room.

For N parameters on a rank, c bytes in the format of compute and a in that of accumulation, over d data-parallel ranks
with zero sharding (Rajbhandari et al. 2020): weights c N, with fp8 two bytes more for each that is cast; gradients a N,
with zero = 2 a N / d; optimizer (k + master) a N, divided by d with zero >= 1, for k state tensors and a master copy
where the two formats differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.schedules import SCHEDULES
from megascale.config.run import RunConfig
from megascale.layout.buckets import pack
from megascale.layout.chunks import chunk_buckets, eight_bit_weights
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, Parameter
from megascale.plan.activations import ActivationBytes, activation_bytes
from megascale.plan.peak import PeakBytes, peak_bytes
from megascale.schedule.ir import Order


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank. `transient`: the whole gradients that exist during a backward with zero = 2, one that is
    computed and, if reductions are overlapped, one that is reduced, with the shard that the reduction gives; and where
    other chunks' backwards may come between the loss and its own, that of the bucket with the head.
    """

    weights: int
    gradients: int
    optimizer: int
    transient: int

    @property
    def lasting(self) -> int:
        """All that is there between two steps as well."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.lasting + self.transient


def state_bytes(config: RunConfig, pp_rank: int) -> StateBytes:
    """Bytes of weights, gradients and optimizer on a rank of pipeline stage `pp_rank`, of a resolved configuration."""
    facts = PRECISIONS[config.train.precision].facts
    compute, accumulate = facts["compute_bytes"], facts["accumulate_bytes"]
    tensors = OPTIMIZERS[config.optimizer.name].facts["state"] + (1 if facts["master"] else 0)
    shards, zero = config.dp * config.parallel.cp, config.parallel.zero
    sizes = [sum(_sizes(chunk, config.parallel.tp, shards)) for chunk in chunk_buckets(config, pp_rank)]
    n = sum(sizes)
    whole = max(sizes) * (2 if config.overlap.dp else 1) + _early(config, pp_rank) + max(sizes) // shards
    return StateBytes(
        weights=compute * n + facts["cast_bytes"] * _cast(config, pp_rank),
        gradients=accumulate * (n // shards if zero == 2 else n),
        optimizer=tensors * accumulate * (n // shards if zero else n),
        transient=accumulate * whole if zero == 2 else 0,
    )


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds in a step, at most. `peak`: beside weights, gradients and optimizer, when that is most."""

    state: StateBytes
    activations: ActivationBytes
    peak: PeakBytes

    @property
    def total(self) -> int:
        return self.state.lasting + self.peak.total


def rank_bytes(config: RunConfig) -> list[RankBytes]:
    """Of a rank of each pipeline stage, of a resolved configuration."""
    p = config.parallel
    assert p.schedule is not None, "a resolved configuration names its schedule"
    card, count = SCHEDULES[p.schedule], config.micro_batches
    orders = card.load()(p.pp, p.vpp, count if card.facts["piles"] else representative(p.pp, count))
    return [of_rank(config, rank, order) for rank, order in enumerate(orders)]


def of_rank(config: RunConfig, pp_rank: int, order: Order) -> RankBytes:
    """Of a rank of pipeline stage `pp_rank` that does `order`."""
    activations = activation_bytes(config, pp_rank, order)
    return RankBytes(state_bytes(config, pp_rank), activations, peak_bytes(config, pp_rank, order, activations))


def representative(p: int, count: int) -> int:
    """As many micro-batches as show the most that is alive at once in `count`, for p stages, where it does not grow
    with their number: after a group of p for each stage nothing is new, and as many are left over.
    """
    return min(count, (p + 4) * p + count % p)


def fullest_rank(config: RunConfig) -> RankBytes:
    """The rank that holds most."""
    return max(rank_bytes(config), key=lambda rank: rank.total)


def _early(config: RunConfig, pp_rank: int) -> int:
    """Numbers of the bucket with the head, on the rank that forms the loss and has other chunks beside."""
    p, tp = config.parallel, config.parallel.tp
    if p.vpp == 1 or pp_rank < p.pp - 1:
        return 0
    head = TOKEN_EMBEDDING if config.model.tie_embeddings else HEAD
    buckets = chunk_buckets(config, pp_rank)[-1]
    return next(pack(b, tp, config.dp * p.cp).size for b in buckets if head in [each.name for each in b])


def _cast(config: RunConfig, pp_rank: int) -> int:
    """Numbers of a rank's weights that products read in 8 bits."""
    chosen = set(eight_bit_weights(config))
    chunks = chunk_buckets(config, pp_rank)
    held = (parameter for chunk in chunks for bucket in chunk for parameter in bucket)
    return sum(parameter.local_numel(config.parallel.tp) for parameter in held if parameter.name in chosen)


def _sizes(chunk: list[list[Parameter]], tp: int, shards: int) -> Iterator[int]:
    return (pack(bucket, tp, shards).size for bucket in chunk)
