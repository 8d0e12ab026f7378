"""Bytes that a rank's weights, gradients and optimizer take, exact, from the layout of its buckets; and with what
`plan.activations` and `plan.peak` say, a rank's room.

For N parameters on a rank, c bytes in the format of compute and a in that of accumulation, over d data-parallel ranks
with zero sharding (Rajbhandari et al. 2020): weights c N, with fp8 two bytes more for each that is cast; gradients a N,
with zero = 2 a N / d; optimizer (k + master) a N, divided by d with zero >= 1, for k state tensors and a master copy
where the two formats differ. A trainer that shards weights (ZeRO 3, FSDP) divides all of them by d, and has two units
of the network whole, the one that computes and the next, with one whole gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.schedules import SCHEDULES
from megascale.config.run import RunConfig
from megascale.core.registry import Card
from megascale.layout.buckets import pack
from megascale.layout.chunks import chunk_buckets, eight_bit_weights, stages_of, unit
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, Parameter, stage
from megascale.plan.activations import ActivationBytes, activation_bytes
from megascale.plan.orders import Orders
from megascale.plan.peak import PeakBytes, ceiling, peak_bytes, whole_gradients
from megascale.schedule.interleaved import groups_of

SEEN = 3
"""Groups of micro-batches, as many as there are stages, after which a schedule of many chunks does again what it has
done; of one chunk one group and `MORE` micro-batches.
"""

MORE = 4


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank. `transient`: the whole gradients that exist during a backward with zero = 2, one that is
    computed and, if reductions are overlapped, one that is reduced, with the shard that the reduction gives; and where
    other chunks' backwards may come between the loss and its own, that of the bucket with the head; or the one that is
    whole where weights are sharded.
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


def state_bytes(config: RunConfig, pp_rank: int, *, shards_weights: bool = False) -> StateBytes:
    """Bytes of weights, gradients and optimizer on a rank of pipeline stage `pp_rank`, of a resolved configuration.
    `shards_weights`: as another trainer would, whatever `parallel.zero` is.
    """
    facts = PRECISIONS[config.train.precision].facts
    compute, accumulate = facts["compute_bytes"], facts["accumulate_bytes"]
    tensors = OPTIMIZERS[config.optimizer.name].facts["state"] + (1 if facts["master"] else 0)
    shards, zero = config.dp * config.parallel.cp, config.parallel.zero
    sizes = [sum(_sizes(chunk, config.parallel.tp, shards)) for chunk in chunk_buckets(config, pp_rank)]
    n, cast = sum(sizes), facts["cast_bytes"] * _cast(config, pp_rank)
    if shards_weights:
        return StateBytes(
            weights=(compute * n + cast) // shards,
            gradients=accumulate * n // shards,
            optimizer=tensors * accumulate * n // shards,
            transient=accumulate * _units(config, pp_rank)[0],
        )
    whole = max(sizes) * (2 if config.overlap.dp else 1) + _early(config, pp_rank) + max(sizes) // shards
    return StateBytes(
        weights=compute * n + cast,
        gradients=accumulate * (n // shards if zero == 2 else n),
        optimizer=tensors * accumulate * (n // shards if zero else n),
        transient=accumulate * whole if zero == 2 else 0,
    )


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds in a step, at most. `peak`: beside weights, gradients and optimizer, when that is most.
    `gathered`: weights that are whole for a while, where they are sharded.
    """

    state: StateBytes
    activations: ActivationBytes
    peak: PeakBytes
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.state.lasting + self.peak.total + self.gathered


def rank_bytes(config: RunConfig, *, shards_weights: bool = False) -> list[RankBytes]:
    """Of a rank of each pipeline stage, of a resolved configuration. `shards_weights`: as in `state_bytes`."""
    played = _played(config)
    return [_of_rank(config, rank, played, shards_weights) for rank in range(config.parallel.pp)]


def first_rank(config: RunConfig, *, shards_weights: bool = False) -> RankBytes:
    """Of a rank of the first pipeline stage, as a rule the fullest: found sooner than those of all."""
    return _of_rank(config, 0, _played(config), shards_weights)


class _Played(NamedTuple):
    """What each pipeline rank does with as many micro-batches as show the most that is alive at once. Where they pile
    up: with one more, and how many there are beyond the first.
    """

    orders: Orders
    longer: Orders
    left: int


def _played(config: RunConfig) -> _Played:
    p, count = config.parallel, config.micro_batches
    few = representative(p.pp, p.vpp, count)
    left = count - few if _schedule(config).facts["piles"] else 0
    orders = _orders(config, few)
    return _Played(orders, _orders(config, few + 1) if left else orders, left)


def _orders(config: RunConfig, count: int) -> Orders:
    return Orders(_schedule(config).load()(config.parallel.pp, config.parallel.vpp, count))


def _schedule(config: RunConfig) -> Card:
    assert config.parallel.schedule is not None, "a resolved configuration names its schedule"
    return SCHEDULES[config.parallel.schedule]


def _of_rank(config: RunConfig, pp_rank: int, played: _Played, shards_weights: bool) -> RankBytes:
    few = _in_order(config, pp_rank, played.orders, shards_weights)
    if not played.left:
        return few
    longer, each = _in_order(config, pp_rank, played.longer, shards_weights), sum(few.activations.kept)
    if _grown(few, 1, each) == longer:  # by all that a micro-batch keeps, and by no more will it ever
        return _grown(few, played.left, each)
    return _in_order(config, pp_rank, _orders(config, config.micro_batches), shards_weights)


def _grown(few: RankBytes, count: int, each: int) -> RankBytes:
    """With so many micro-batches more that are alive when most is."""
    peak = replace(few.peak, kept=few.peak.kept + count * each)
    return replace(few, activations=replace(few.activations, peak=few.activations.peak + count * each), peak=peak)


def _in_order(config: RunConfig, pp_rank: int, orders: Orders, shards_weights: bool) -> RankBytes:
    found = _unplayed(config, pp_rank, orders, shards_weights)
    if not shards_weights:
        return replace(found, peak=peak_bytes(config, pp_rank, orders, found.activations))
    plain = config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero": 1})})
    peak = peak_bytes(plain, pp_rank, orders, found.activations)
    return replace(found, peak=replace(peak, gradients=found.state.transient))


def _unplayed(config: RunConfig, pp_rank: int, orders: Orders, shards_weights: bool) -> RankBytes:
    """All but the peak."""
    state = state_bytes(config, pp_rank, shards_weights=shards_weights)
    size = PRECISIONS[config.train.precision].facts["compute_bytes"]
    gathered = size * sum(_units(config, pp_rank)[:2]) if shards_weights else 0
    return RankBytes(state, activation_bytes(config, pp_rank, orders[pp_rank]), PeakBytes(), gathered)


def representative(p: int, v: int, count: int) -> int:
    """As many micro-batches as show all that is alive at once in `count`, for p stages of v chunks, where it does not
    grow with their number. With chunks they go in groups: after some of a size nothing is new.
    """
    if v == 1:
        return min(count, p + MORE)
    return sum(min(groups.number, SEEN) * groups.size for groups in groups_of(p, count))


def fullest_rank(config: RunConfig, *, shards_weights: bool = False, room: float = math.inf) -> RankBytes:
    """The rank that holds most, or one that holds more than `room` bytes. The ends of the pipeline come first, and of
    the others none is played that cannot hold more.
    """
    played, last = _played(config), config.parallel.pp - 1
    best = _of_rank(config, 0, played, shards_weights)
    for rank in (last, *range(1, last)) if last else ():
        if best.total > room:
            break
        if _ceiling(config, rank, played, shards_weights) > best.total:
            found = _of_rank(config, rank, played, shards_weights)
            best = max(best, found, key=lambda held: held.total)
    return best


def _ceiling(config: RunConfig, pp_rank: int, played: _Played, shards_weights: bool) -> int:
    """As much as a rank holds, or more."""
    alone = _unplayed(config, pp_rank, played.orders, shards_weights)
    grown = played.left * sum(alone.activations.kept)
    gradients = alone.state.transient if shards_weights else whole_gradients(config, pp_rank)
    return alone.state.lasting + alone.gathered + grown + gradients + ceiling(config, pp_rank, alone.activations)


def _early(config: RunConfig, pp_rank: int) -> int:
    """Numbers of the bucket with the head, on the rank that forms the loss and has other chunks beside."""
    p, tp = config.parallel, config.parallel.tp
    if p.vpp == 1 or pp_rank < p.pp - 1:
        return 0
    head = TOKEN_EMBEDDING if config.model.tie_embeddings else HEAD
    buckets = chunk_buckets(config, pp_rank)[-1]
    return next(pack(b, tp, config.dp * p.cp).size for b in buckets if head in [each.name for each in b])


def _units(config: RunConfig, pp_rank: int) -> list[int]:
    """Numbers in the embedding, in each layer and in the head, as far as a rank has them, the largest first."""
    p, layout, found = config.parallel, stages_of(config), Counter[str]()
    for parameter in stage(config.model, p.tp, range(1), pp_rank == 0, pp_rank == p.pp - 1):
        found[unit(parameter.name)] += parameter.local_numel(p.tp)
    layers = sum(len(layout.layers(layout.index(pp_rank, chunk))) for chunk in range(p.vpp))  # all alike
    return sorted([found.pop("layers.0")] * layers + list(found.values()), reverse=True)


def _cast(config: RunConfig, pp_rank: int) -> int:
    """Numbers of a rank's weights that products read in 8 bits."""
    chosen = set(eight_bit_weights(config))
    chunks = chunk_buckets(config, pp_rank)
    held = (parameter for chunk in chunks for bucket in chunk for parameter in bucket)
    return sum(parameter.local_numel(config.parallel.tp) for parameter in held if parameter.name in chosen)


def _sizes(chunk: list[list[Parameter]], tp: int, shards: int) -> Iterator[int]:
    return (pack(bucket, tp, shards).size for bucket in chunk)
