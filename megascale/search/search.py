"""The fastest layouts of a model on a number of devices: bounds first, then a simulation of the finalists.

Layouts whose memory cannot fit by a bound are dropped; the others are taken in the order of the least time that their
step may take (`search.bounds`). Each that is legal and fits is simulated, until the bound of the next is above the last
step time that is kept: no layout after it can be faster.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from megascale.account.memory import RankMemory, fullest_rank
from megascale.config.rules import divisors
from megascale.config.run import RunConfig
from megascale.core.units import format_bytes
from megascale.search.bounds import Bounds, least_seconds
from megascale.search.space import RECOMPUTE, Layout, Space
from megascale.simulate.profiles import Hardware, Stack
from megascale.simulate.step_time import Estimate, StepParts, estimate

KEPT = 10
"""Layouts that a search returns, unless asked otherwise."""

FILLED = 0.98
"""The part of a device's room that a search fills: formulas of memory are that close to dry runs of large models."""

NEAREST = 17
"""Numbers of devices that are tried for a legal layout, and layouts of each."""

DOUBLED = 6
"""How often the number of devices is doubled to see how many would fit the model."""

TOLD = 0.2
"""A cause is named that has this part of all that a layout loses."""

ALIKE = 5e-4
"""The part of a step's time by which two steps count as equally fast."""


@dataclass(frozen=True)
class Sized:
    """A layout with its resolved configuration, and the memory of its fullest rank."""

    layout: Layout
    config: RunConfig
    memory: RankMemory


@dataclass(frozen=True)
class Candidate(Sized):
    """A layout that was simulated. `lost`: why it is not the first, in a few words; empty for the first."""

    estimate: Estimate
    lost: str = ""


@dataclass(frozen=True)
class Found:
    """The fastest layouts that fit, in order. All `legal` layouts are `too_large`, `pruned` by a bound of time, or
    `simulated`. Where none fits, the `smallest` legal one and the smallest on a `larger` number of devices that fits.
    """

    best: list[Candidate]
    counts: Mapping[str, int]
    smallest: Sized | None = None
    larger: Sized | None = None


def search(
    config: RunConfig,
    devices: int,
    hardware: Hardware,
    stack: Stack,
    fixed: Collection[str] = (),
    *,
    filled: float = FILLED,
    kept: int = KEPT,
) -> Found:
    """Find the `kept` fastest layouts that take `filled` of a device's room, no two of one `row`.

    `config` is resolved; its own layout counts only in the keys that `fixed` names (`parallel.tp`, `batch.micro`).
    tp stays inside a node, whose links it needs, if any layout fits so.
    """
    if stack.shards_weights:  # its stage of ZeRO is its own
        fixed = [*fixed, "parallel.zero"]
    counts = dict.fromkeys(("legal", "too_large", "pruned", "simulated"), 0)
    finder = _Finder(Space(config, devices, frozenset(fixed)), hardware, stack, filled)
    for tps in (finder.inside, finder.beyond):
        if best := finder.fastest(tps, kept, counts):
            return Found(best, counts)
    smallest = finder.smallest([*finder.inside, *finder.beyond])
    for count in (devices << doubled for doubled in range(1, DOUBLED + 1)) if smallest else ():
        finder = _Finder(Space(config, count, frozenset(fixed)), hardware, stack, filled)
        larger = finder.smallest(finder.inside, below=finder.room)
        if larger and larger.memory.total <= finder.room:
            return Found([], counts, smallest, larger)
    return Found([], counts, smallest)


def legal_near(config: RunConfig, devices: int, fixed: Collection[str] = ()) -> int | None:
    """Find the number of devices nearest to so many for which a layout is legal, if one of the `NEAREST` has any."""
    for count in Space(config, devices, frozenset(fixed)).others()[:NEAREST]:
        space = Space(config, count, frozenset(fixed))
        layouts = itertools.islice(space.layouts(divisors(count, config.model.num_heads)), NEAREST)
        if any(space.legal(space.applied(layout)) for layout in layouts):
            return count
    return None


def row(layout: Layout) -> Layout:
    """Reduce a layout to its row of the table: vpp, schedule, recomputation and zero trade memory for a little time."""
    return layout._replace(vpp=1, schedule="", recompute="", zero=0)


def lost(candidate: Candidate, first: Candidate) -> str:
    """Name what a candidate loses against the first, by cause; or say that it is as fast, and how much larger."""
    one, other = candidate.estimate, first.estimate
    if one.step_s - other.step_s <= ALIKE * other.step_s:
        larger = candidate.memory.total - first.memory.total
        return f"as fast, {'+' if larger >= 0 else '-'}{format_bytes(abs(larger))}"
    more = {cause: seconds - other.causes.get(cause, 0.0) for cause, seconds in one.causes.items()}
    worse = sorted(((seconds, cause) for cause, seconds in more.items() if seconds > 0), reverse=True)
    told = [each for each in worse if each[0] >= TOLD * sum(seconds for seconds, _ in worse)] or worse[:1]
    return ", ".join(f"{cause} +{seconds:.2g} s" for seconds, cause in told)


class _Finder:
    """Looks for layouts of a space, on some hardware with some stack."""

    def __init__(self, space: Space, hardware: Hardware, stack: Stack, filled: float) -> None:
        self._space, self._hardware, self._stack = space, hardware, stack
        self._bounds, self.room = Bounds(space, hardware, stack), int(filled * hardware.room(space.devices))
        tps = divisors(space.devices, space.config.model.num_heads)
        self.inside = [tp for tp in tps if hardware.node.devices % tp == 0]  # whose groups lie inside a node
        self.beyond = [] if "parallel.tp" in space.fixed else [tp for tp in tps if tp not in self.inside]

    def fastest(self, tps: Collection[int], kept: int, counts: dict[str, int]) -> list[Candidate]:
        """Simulate layouts with these tp until no other can be faster than the `kept` best. Adds to the `counts`.

        A layout waits by its bound, then by that of its own chunks. One that recomputes more than another that fits is
        not faster.
        """
        waiting, limit = list[tuple[float, Layout, StepParts | None]](), math.inf
        for layout in self._space.layouts(tps):
            small = self._bounds.memory(layout) <= self.room
            counts["legal"], counts["too_large"] = counts["legal"] + 1, counts["too_large"] + (not small)
            if small:
                waiting.append((self._bounds.step_s(layout), layout, None))
        heapq.heapify(waiting)
        best, fitting = dict[Layout, tuple[float, int, Layout, Sized]](), set[Layout]()
        while waiting and waiting[0][0] <= limit:
            least, layout, parts = heapq.heappop(waiting)
            own = best.get(row(layout))
            less = RECOMPUTE[: RECOMPUTE.index(layout.recompute)]
            if (own and least > own[0]) or any(layout._replace(recompute=each) in fitting for each in less):
                continue
            if parts is None:
                parts = StepParts(self._space.applied(layout), self._hardware, self._stack)
                if self._space.legal(parts.config):
                    heapq.heappush(waiting, (least_seconds(parts), layout, parts))
                else:
                    counts["legal"] -= 1
                continue
            memory = fullest_rank(parts.config, self._stack.holding, self.room)
            if memory.total > self.room:
                counts["too_large"] += 1
                continue
            fitting.add(layout)
            counts["simulated"] += 1
            timed = parts.step_s, memory.total, layout, Sized(layout, parts.config, memory)
            best[row(layout)] = min(own or timed, timed)
            limit = sorted(best.values())[kept - 1][0] if len(best) >= kept else math.inf
        counts["pruned"] = counts["legal"] - counts["too_large"] - counts["simulated"]
        first = [sized for *_, sized in sorted(best.values())[:kept]]
        found = [Candidate(**vars(each), estimate=estimate(each.config, self._hardware, self._stack)) for each in first]
        return [replace(each, lost=lost(each, found[0])) if at else each for at, each in enumerate(found)]

    def smallest(self, tps: Collection[int], below: float = math.inf) -> Sized | None:
        """Find the layout with these tp that needs least memory; None where a bound shows that it needs `below` bytes
        or more.
        """
        best: Sized | None = None
        lean = ((self._bounds.memory(layout), layout) for layout in self._space.layouts(tps, lean=True))
        for least, layout in sorted(lean):
            room = best.memory.total if best else below
            if least >= room:
                break
            config = self._space.applied(layout)
            if self._space.legal(config):
                memory = fullest_rank(config, self._stack.holding, best.memory.total if best else math.inf)
                if best is None or (memory.total, layout) < (room, best.layout):
                    best = Sized(layout, config, memory)
        return best
