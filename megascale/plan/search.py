"""The fastest layouts of a model on a number of devices.

Best first, branch and bound: layouts wait in a queue by the least time that they may take, which is made exact in
stages (`least.Floors`, then `least.least_time`, then a replay), each only when it is a layout's turn. The search ends
when no layout that waits can be faster than the last that is kept. Memory is judged likewise: by a floor at once, of
the first rank when it is a layout's turn, and of all ranks where it is fast enough to be kept.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megascale.config.rules import divisors
from megascale.config.run import RunConfig
from megascale.plan.candidate import Candidate, lost
from megascale.plan.layouts import Layout, Space
from megascale.plan.least import Floors
from megascale.plan.memory import RankBytes, first_rank, fullest_rank
from megascale.plan.profiles import Hardware, Stack
from megascale.plan.steps import Steps

KEPT = 10
"""Layouts that are returned, unless asked otherwise."""

NEAR = 17
"""Numbers of devices of which one is looked for that has a legal layout, and of each its layouts."""

SOME = 16
"""Layouts that fit of which one is proposed."""

DOUBLED = 6
"""How often the number of devices is doubled to see what would fit."""


@dataclass(frozen=True)
class Counts:
    """Layouts: all `legal` ones, of which some are `too_large`, some `pruned` since they cannot be fast enough, and the
    others `simulated`. Those of which neither time nor room would do are one or the other.
    """

    legal: int = 0
    too_large: int = 0
    pruned: int = 0
    simulated: int = 0


@dataclass(frozen=True)
class Sized:
    """A layout with its resolved configuration, and the bytes of its fullest rank."""

    layout: Layout
    config: RunConfig
    memory: RankBytes


@dataclass(frozen=True)
class Found:
    """The fastest layouts that fit, the fastest first. `smallest`: which needs least memory, where none fits, unless
    none is legal.
    """

    best: tuple[Candidate, ...]
    counts: Counts
    smallest: Sized | None = None


@dataclass(frozen=True)
class Instead:
    """What to plan in place of what does not fit: a layout that does; where none does, the `smallest`, unless none is
    legal, and what more devices fit, if they do.
    """

    fits: Sized | None = None
    smallest: Sized | None = None
    larger: Sized | None = None


def search(
    config: RunConfig,
    devices: int,
    hardware: Hardware,
    stack: Stack,
    room: int,
    fixed: Collection[str] = (),
    kept: int = KEPT,
) -> Found:
    """The `kept` fastest layouts of a resolved configuration, whose own layout counts only in the keys that `fixed`
    names (`parallel.tp`, `batch.micro`). `room`: bytes of a device for a rank's tensors.

    Of layouts that differ in how a stage is cut into chunks alone, the fastest stands for all: times hardly differ.
    tp stays inside a node, whose links it needs, if any layout fits so.
    """
    space = Space(config, devices, frozenset(fixed))
    anywhere = divisors(devices, config.model.num_heads)
    tps = _inside(anywhere, hardware)
    bound = _Search(space, hardware, stack, room, kept)
    found = bound.among(tps)
    if not found.best and tps != anywhere and "parallel.tp" not in fixed:
        found = bound.among([tp for tp in anywhere if tp not in tps])
        tps = anywhere
    return found if found.best else replace(found, smallest=bound.smallest(tps))


def fitting(
    config: RunConfig, devices: int, hardware: Hardware, stack: Stack, room: int, fixed: Collection[str] = ()
) -> Instead:
    """A layout that fits, found sooner than the fastest, by bounds and in a coarse space. Where none does, that which
    needs least memory. Arguments as of `search`.
    """
    anywhere = divisors(devices, config.model.num_heads)
    inside = _inside(anywhere, hardware)
    tps = [inside] if "parallel.tp" in fixed else [inside, [tp for tp in anywhere if tp not in inside]]
    bound = _Search(Space(config, devices, frozenset(fixed), coarse=True), hardware, stack, room, 1)
    found = next((found for some in tps if (found := bound.fitting(some))), None)
    return Instead(fits=found) if found else Instead(smallest=bound.smallest([tp for some in tps for tp in some]))


def enough(
    config: RunConfig, devices: int, hardware: Hardware, stack: Stack, share: float, fixed: Collection[str] = ()
) -> Sized | None:
    """The smallest layout, with tp inside a node, of the first of 2, 4, 8 ... times as many devices that some layout
    fits; it may fill a `share` of a device's room.
    """
    for count in (devices << doubled for doubled in range(1, DOUBLED + 1)):
        tps = _inside(divisors(count, config.model.num_heads), hardware)
        room = int(share * hardware.room(count))
        space = Space(config, count, frozenset(fixed), coarse=True)
        found = _Search(space, hardware, stack, room, 0).smallest(tps, below=room)
        if found and found.memory.total <= room:
            return found
    return None


def legal_near(config: RunConfig, devices: int, fixed: Collection[str] = ()) -> int | None:
    """The number of devices nearest to so many for which there is a legal layout, if one of the nearest has any."""
    for count in Space(config, devices, frozenset(fixed)).others()[:NEAR]:
        space = Space(config, count, frozenset(fixed), coarse=True)
        layouts = space.layouts(divisors(count, config.model.num_heads))
        if any(space.legal(space.applied(layout)) for layout in itertools.islice(layouts, NEAR)):
            return count
    return None


def _inside(tps: Collection[int], hardware: Hardware) -> list[int]:
    """Those tp whose groups lie in one node."""
    return [tp for tp in tps if hardware.node.devices % tp == 0]


class _Ranked(NamedTuple):
    """A layout that fits; they compare as they are ranked."""

    step_s: float
    bytes: int
    layout: Layout

    @property
    def kind(self) -> Layout:
        """The same for layouts that differ in their chunks alone."""
        return self.layout._replace(vpp=1, schedule="")


class _Waiting(NamedTuple):
    """A layout in a queue. `least`: seconds, or bytes. `stage`: how exact."""

    least: float
    stage: int
    layout: Layout


class _Search:
    """Its counts and its best, as they grow."""

    def __init__(self, space: Space, hardware: Hardware, stack: Stack, room: int, kept: int) -> None:
        self._space, self._room, self._kept = space, room, kept
        self._floors, self._steps = Floors(space, hardware, stack), Steps(hardware, stack)
        self._shards_weights = stack.shards_weights
        self._first_rank = partial(first_rank, shards_weights=stack.shards_weights)
        self._fullest_rank = partial(fullest_rank, shards_weights=stack.shards_weights)
        self._best: list[_Ranked] = []
        self._memory: dict[Layout, RankBytes] = {}
        self._legal = self._large = self._simulated = 0

    def among(self, tps: Collection[int]) -> Found:
        """The best with one of these tp, where none that was looked at before fits."""
        for layout in self._in_turn(tps):
            self._simulate(layout)
        pruned = self._legal - self._large - self._simulated
        counts = Counts(self._legal, self._large, pruned, self._simulated)
        return Found(tuple(self._candidates()), counts)

    def fitting(self, tps: Collection[int]) -> Sized | None:
        """Of the `SOME` that are likely to be fastest and fit, with one of these tp, the one that may be by a bound."""
        found = list[tuple[float, Sized]]()
        likely = [each._replace(least=self._floors.likely_s(each.layout)) for each in self._waiting(tps)]
        for waiting in sorted(likely):
            for layout in self._sharded(waiting.layout):
                config = self._space.applied(layout)
                if self._may_fit(layout, config) and self._fits(layout, config):
                    found.append((self._steps.least_s(config), Sized(layout, config, self._memory[layout])))
                    break
            if len(found) == SOME:
                break
        return min(found, key=lambda each: each[0])[1] if found else None

    def _may_fit(self, layout: Layout, config: RunConfig) -> bool:
        small = self._floors.memory(layout) <= self._room and self._space.legal(config)
        return small and self._first_rank(config).total <= self._room

    def _waiting(self, tps: Collection[int]) -> list[_Waiting]:
        """Layouts with one of these tp that may fit, by the least time that they may take."""
        queue = list[_Waiting]()
        for layout in self._space.layouts(tps):
            sharded = self._sharded(layout)
            fitting = [each for each in sharded if self._floors.memory(each) <= self._room]
            self._legal, self._large = self._legal + len(sharded), self._large + len(sharded) - len(fitting)
            if fitting:
                queue.append(_Waiting(self._floors.step_s(layout), 0, layout))
        return queue

    def _in_turn(self, tps: Collection[int]) -> Iterator[Layout]:
        """Those of them that may be fast enough to be kept: those first that may be fastest."""
        queue = self._waiting(tps)
        heapq.heapify(queue)
        while queue and queue[0].least <= self._limit:
            waiting = heapq.heappop(queue)
            if waiting.stage:
                yield waiting.layout
                continue
            for each in self._sharded(waiting.layout):
                if self._floors.memory(each) <= self._room:
                    least = max(waiting.least, self._steps.least_s(self._space.applied(each)))
                    heapq.heappush(queue, _Waiting(least, 1, each))

    def smallest(self, tps: Collection[int], below: float = math.inf) -> Sized | None:
        """That which needs least memory, with one of these tp, of those that keep least: smallest micro-batches, and as
        much computed again as may be. None where it can be seen that it is not `below` so many bytes.
        """
        queue = [
            _Waiting(self._floors.memory(each), 0, each)
            for layout in self._space.layouts(tps, lean=True)
            for each in self._sharded(layout)
        ]
        heapq.heapify(queue)
        best: Sized | None = None
        while queue and queue[0].least < (best.memory.total if best else below):
            waiting = heapq.heappop(queue)
            config = self._space.applied(waiting.layout)
            if waiting.stage == 0:
                heapq.heappush(queue, _Waiting(self._first_rank(config).total, 1, waiting.layout))
            elif self._space.legal(config):
                found = Sized(
                    waiting.layout, config, self._fullest_rank(config, room=best.memory.total if best else math.inf)
                )
                best = min(found, best or found, key=lambda sized: (sized.memory.total, sized.layout))
        return best

    @property
    def _limit(self) -> float:
        """Seconds that a step may take to be kept."""
        return self._best[-1].step_s if len(self._best) == self._kept else float("inf")

    def _sharded(self, layout: Layout) -> list[Layout]:
        zeros = self._space.zeros(layout.dp)
        return [layout._replace(zero=zero) for zero in (zeros[-1:] if self._shards_weights else zeros)]

    def _simulate(self, layout: Layout) -> None:
        config = self._space.applied(layout)
        if not self._space.legal(config):
            self._legal -= 1
            return
        any_time = len(self._best) < self._kept  # is fast enough: memory is known sooner
        if self._first_rank(config).total > self._room or (any_time and not self._fits(layout, config)):
            self._large += 1
            return
        step_s = self._steps.step_s(config)
        if step_s > self._limit:
            self._simulated += 1
        elif any_time or self._fits(layout, config):
            self._simulated += 1
            self._keep(_Ranked(step_s, self._memory[layout].total, layout))
        else:
            self._large += 1

    def _keep(self, found: _Ranked) -> None:
        alike = [each for each in self._best if each.kind == found.kind]
        others = [each for each in self._best if each.kind != found.kind]
        self._best = sorted([*others, min([*alike, found])])[: self._kept]

    def _fits(self, layout: Layout, config: RunConfig) -> bool:
        self._memory[layout] = self._fullest_rank(config, room=self._room)
        return self._memory[layout].total <= self._room

    def _candidates(self) -> Iterator[Candidate]:
        first: Candidate | None = None
        for ranked in self._best:
            config = self._space.applied(ranked.layout)
            found = Candidate(ranked.layout, config, self._memory[ranked.layout], self._steps.estimate(config))
            yield replace(found, lost=lost(found, first)) if first else found
            first = first or found
