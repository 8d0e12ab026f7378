"""Search for the fastest layouts of a model on a number of devices (`search`), by branch and bound.

Lower bounds (`search.bounds`) drop layouts over the memory limit and sort the rest by step time. Layouts that fit are
simulated in this order, until the next bound exceeds the slowest step time in the result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from megascale.account.memory import fullest_rank
from megascale.config.rules import divisors
from megascale.config.run import RunConfig
from megascale.search.bounds import Bounds
from megascale.search.plan import Plan
from megascale.search.space import RECOMPUTE, Layout, Space
from megascale.simulate.profiles import Hardware, Stack
from megascale.simulate.step_time import StepParts

FILLED = 0.98  # share of a device's memory to fill: formulas are within 2% of dry runs of large models
DOUBLED = 6  # most doublings of the devices in the search for a job that fits


@dataclass(frozen=True)
class Found:
    """The `best` layouts of a space, fastest first. `counts`: `legal` layouts are `too_large`, `pruned` by a bound of
    time, or `simulated`. If none fits: the `smallest` legal plan, and a `larger` job that fits.
    """

    space: Space
    counts: Mapping[str, int]
    best: list[Plan]
    smallest: Plan | None = None
    larger: Plan | None = None


def search(
    config: RunConfig,
    devices: int,
    hardware: Hardware,
    stack: Stack,
    fixed: Collection[str] = (),
    *,
    filled: float = FILLED,
    results: int = 10,
) -> Found:
    """Find the fastest layouts within `filled` of a device's memory, with distinct `row`s.

    `config` is resolved; only its keys in `fixed`, such as `parallel.tp`, constrain the layouts. Groups of tp stay
    inside a node if any such layout fits.
    """
    if stack.shards_weights:  # the stack sets the stage of ZeRO
        fixed = [*fixed, "parallel.zero"]
    space = Space(config, devices, frozenset(fixed))
    counts = Counter[str]()
    finder = _Finder(space, hardware, stack, filled)
    for tps in (finder.inside, finder.beyond):
        if best := finder.fastest(tps, results, counts):
            return Found(space, counts, best)
    smallest = finder.smallest([*finder.inside, *finder.beyond])
    for doubled in range(1, DOUBLED + 1) if smallest else ():
        finder = _Finder(replace(space, devices=devices << doubled), hardware, stack, filled)
        if larger := finder.smallest(finder.inside, below=finder.room + 1):
            return Found(space, counts, [], smallest, larger)
    return Found(space, counts, [], smallest)


def row(layout: Layout) -> Layout:
    """Reduce a layout to its table row: vpp, schedule, recomputation and zero trade memory for little time."""
    return layout._replace(vpp=1, schedule="", recompute="", zero=0)


class _Finder:
    """Branch and bound over a space's layouts, on some hardware with some stack."""

    def __init__(self, space: Space, hardware: Hardware, stack: Stack, filled: float) -> None:
        self._space, self._hardware, self._stack = space, hardware, stack
        self._bounds, self.room = Bounds(space, hardware, stack), int(filled * hardware.room(space.devices))
        tps = divisors(space.devices, space.config.model.num_heads)
        self.inside = [tp for tp in tps if hardware.node.devices % tp == 0]  # tp groups inside a node
        self.beyond = [] if "parallel.tp" in space.fixed else [tp for tp in tps if tp not in self.inside]

    def fastest(self, tps: Collection[int], results: int, counts: Counter[str]) -> list[Plan]:
        """Simulate layouts with these tp in the order of their bounds, and add to `counts`. Layouts with more
        recomputation than a fitting one are skipped: they are slower.
        """
        sizes = {layout: self._bounds.memory(layout) for layout in self._space.layouts(tps)}
        small = [(self._bounds.step_s(layout), layout) for layout, size in sizes.items() if size <= self.room]
        best, fitting = dict[Layout, tuple[float, int, Layout]](), set[Layout]()
        too_large, limit = len(sizes) - len(small), math.inf
        for bound, layout in sorted(small):
            if bound > limit:
                break
            in_row = best.get(row(layout))
            less = RECOMPUTE[: RECOMPUTE.index(layout.recompute)]
            if (in_row and bound > in_row[0]) or any(layout._replace(recompute=ops) in fitting for ops in less):
                continue
            config = self._space.applied(layout)
            size = fullest_rank(config, self._stack.holding, self.room).total
            if size > self.room:
                too_large += 1
                continue
            fitting.add(layout)
            timed = StepParts(config, self._hardware, self._stack).step_s, size, layout
            best[row(layout)] = min(in_row or timed, timed)
            limit = sorted(best.values())[results - 1][0] if len(best) >= results else math.inf
        pruned = len(sizes) - too_large - len(fitting)
        counts.update(legal=len(sizes), too_large=too_large, pruned=pruned, simulated=len(fitting))
        return [self._plan(layout) for *_, layout in sorted(best.values())[:results]]

    def smallest(self, tps: Collection[int], below: float = math.inf) -> Plan | None:
        """Find the layout with these tp and the lowest memory; None without a layout `below` this number of bytes."""
        best: Layout | None = None
        lean = ((self._bounds.memory(layout), layout) for layout in self._space.layouts(tps, lean=True))
        for bound, layout in sorted(lean):
            if bound >= below:
                break
            size = fullest_rank(self._space.applied(layout), self._stack.holding, below).total
            if size < below:
                below, best = size, layout
        return self._plan(best) if best else None

    def _plan(self, layout: Layout) -> Plan:
        return Plan(self._space.applied(layout), self._hardware, self._stack)
