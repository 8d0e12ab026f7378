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
from functools import lru_cache
from typing import NamedTuple

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.catalog.precisions import PRECISIONS
from megascale.catalog.schedules import SCHEDULES
from megascale.config.run import RunConfig
from megascale.layout.chunks import eight_bit_layers, packed, stages_of, unit
from megascale.layout.tensors import layer, stage
from megascale.plan.activations import ActivationBytes, KeptBytes, kept_bytes
from megascale.plan.orders import Orders, Piece
from megascale.plan.peak import PeakBytes, Stage, ceiling, chunk_kind, peak_bytes, stage_of, whole_gradients
from megascale.schedule.interleaved import groups_of
from megascale.schedule.lower import AHEAD
from megascale.schedule.runs import runs_of

SEEN = 3
"""Groups of micro-batches, as many as there are stages, after which a schedule that goes in groups does again what it
has done.
"""

RECENT = 16
"""Orders that are kept: layouts of a search often have the same."""


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
    sizes = [sum(bucket.numbers for bucket in chunk) for chunk in packed(config, pp_rank)]
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
    ranks = _Ranks(config, shards_weights)
    return [ranks.held(rank) for rank in range(config.parallel.pp)]


def first_rank(config: RunConfig, *, shards_weights: bool = False) -> RankBytes:
    """Of a rank of the first pipeline stage, as a rule the fullest: found sooner than those of all."""
    return _Ranks(config, shards_weights).held(0)


class _Still(NamedTuple):
    """What of a rank is the same whatever the order of its actions."""

    state: StateBytes
    gathered: int
    kept: KeptBytes
    stage: Stage


class _Ranks:
    """The ranks of a configuration, played with as many micro-batches as show the most that is alive at once."""

    def __init__(self, config: RunConfig, shards_weights: bool) -> None:
        p = config.parallel
        plain = p.model_copy(update={"zero": 1}) if shards_weights else p  # no whole gradients but those of `state`
        self._config, self._shards_weights = config.model_copy(update={"parallel": plain}), shards_weights
        assert p.schedule is not None, "a resolved configuration names its schedule"
        in_groups = p.vpp > 1 and SCHEDULES[p.schedule].facts.get("repeats", False)
        count = representative(p.pp, config.micro_batches) if in_groups else config.micro_batches
        self._orders = _orders(p.schedule, p.pp, p.vpp, count)
        self._known: dict[tuple[object, ...], _Still] = {}

    def held(self, rank: int) -> RankBytes:
        """By one of them."""
        still, order = self._still(rank), self._order(rank)
        peak = peak_bytes(self._config, rank, order, still.stage)
        if self._shards_weights:
            peak = replace(peak, gradients=still.state.transient)
        return RankBytes(still.state, still.kept.in_order(order), peak, still.gathered)

    def ceiling(self, rank: int) -> int:
        """As much as one holds, or more."""
        still = self._still(rank)
        gradients = still.state.transient if self._shards_weights else whole_gradients(still.stage)
        most = ceiling(self._config, rank, still.stage, still.kept.in_order(self._order(rank)).peak)
        return still.state.lasting + still.gathered + gradients + most

    def _order(self, rank: int) -> list[Piece]:
        return self._orders.of(rank, AHEAD if self._config.overlap.pp else 0)

    def among(self) -> Iterator[int]:
        """Ranks of which one is the fullest, the ends of the pipeline first. Of those whose chunks do the same the
        first holds most, for it goes furthest ahead; but where chunks differ, whole gradients may be there beside a
        larger one later.
        """
        last, seen = self._config.parallel.pp - 1, set[tuple[object, ...]]()
        yield from (0, last) if last else (0,)
        for rank in range(1, last):
            kind = self._kind(rank)
            if kind not in seen or (self._config.parallel.zero == 2 and len(set(kind)) > 1):
                seen.add(kind)
                yield rank

    def _kind(self, rank: int) -> tuple[object, ...]:
        """The same for ranks whose chunks do the same."""
        return tuple(chunk_kind(self._config, rank, chunk) for chunk in range(self._config.parallel.vpp))

    def _still(self, rank: int) -> _Still:
        """Found once for ranks whose chunks do the same."""
        config, shards = self._config, self._shards_weights
        kind = self._kind(rank)
        if kind not in self._known:
            kept, size = kept_bytes(config, rank), PRECISIONS[config.train.precision].facts["compute_bytes"]
            state = state_bytes(config, rank, shards_weights=shards)
            gathered = size * sum(_units(config, rank)[:2]) if shards else 0
            self._known[kind] = _Still(state, gathered, kept, stage_of(config, rank, kept.kept))
        return self._known[kind]


@lru_cache(RECENT)
def _orders(schedule: str, p: int, v: int, count: int) -> Orders:
    return Orders(runs_of(SCHEDULES[schedule].load(), p, v, count), p, v)


def representative(p: int, count: int) -> int:
    """As many micro-batches as show all that is alive at once in `count`, which go in groups through p stages."""
    return sum(min(groups.number, SEEN) * groups.size for groups in groups_of(p, count))


def fullest_rank(config: RunConfig, *, shards_weights: bool = False, room: float = math.inf) -> RankBytes:
    """The rank that holds most, or one that holds more than `room` bytes. The ends of the pipeline come first, and of
    the others none is played that cannot hold more.
    """
    ranks = _Ranks(config, shards_weights)
    first, *others = ranks.among()
    best = ranks.held(first)
    for rank in others:
        if best.total > room:
            break
        if ranks.ceiling(rank) > best.total:
            best = max(best, ranks.held(rank), key=lambda held: held.total)
    return best


def _early(config: RunConfig, pp_rank: int) -> int:
    """Numbers of the bucket with the head, on the rank that forms the loss and has other chunks beside."""
    p = config.parallel
    if p.vpp == 1 or pp_rank < p.pp - 1:
        return 0
    return packed(config, pp_rank)[-1][-1].numbers


def _units(config: RunConfig, pp_rank: int) -> list[int]:
    """Numbers in the embedding, in each layer and in the head, as far as a rank has them, the largest first."""
    p, layout, found = config.parallel, stages_of(config), Counter[str]()
    for parameter in stage(config.model, p.tp, range(1), pp_rank == 0, pp_rank == p.pp - 1):
        found[unit(parameter.name)] += parameter.local_numel(p.tp)
    layers = sum(len(layout.layers(layout.index(pp_rank, chunk))) for chunk in range(p.vpp))  # all alike
    return sorted([found.pop("layers.0")] * layers + list(found.values()), reverse=True)


def _cast(config: RunConfig, pp_rank: int) -> int:
    """Numbers of a rank's weights that products read in 8 bits."""
    layout, cast = stages_of(config), eight_bit_layers(config)
    held = (number for chunk in range(config.parallel.vpp) for number in layout.layers(layout.index(pp_rank, chunk)))
    matrices = sum(each.local_numel(config.parallel.tp) for each in layer(config.model, 0) if each.decays)
    return matrices * sum(number in cast for number in held)
