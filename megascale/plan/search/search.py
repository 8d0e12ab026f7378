"""Search for the fastest layouts of a model on a number of devices (`search`), by branch and bound.

Lower bounds (`search.bounds`) drop layouts over the memory limit and sort the rest by step time. Layouts that fit are
simulated in this order, until the next bound exceeds the slowest step time in the result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from megascale.config.finding import divisors
from megascale.config.rules import RULES, run_rules
from megascale.config.run import RunConfig
from megascale.config.section import AUTO
from megascale.plan.search.bounds import Bounds
from megascale.plan.search.memory_policy import MEMORY_FRACTION
from megascale.plan.search.plan import Plan
from megascale.plan.search.space import RECOMPUTE, Layout, Space
from megascale.plan.simulate.islands import count_islands
from megascale.plan.simulate.profiles import Hardware, Stack

MIN_GAIN = 0.01  # smallest share of a step that an uneven split of layers must save
TOLD = 1000  # layouts from one line on the state of their bounds to the next
MAX_DOUBLINGS = 6  # most doublings of the devices in the search for a job that fits


@dataclass(frozen=True)
class SearchResult:
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
    memory_fraction: float = MEMORY_FRACTION,
    results: int = 10,
    tell: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Find the fastest layouts within `memory_fraction` of a device's memory, with distinct `row`s. `tell`: is told in
    a line how far the search is.

    With `train.memory = "auto"` the fastest layouts, found with the same recomputation in all layers, get policies.
    `config` is resolved; only its keys in `fixed`, such as `parallel.tp`, constrain the layouts. Groups of tp stay
    inside a node if any such layout fits.
    """
    island = hardware.islands.devices if hardware.islands else 0
    uniform = config.changed(train={"memory": None}) if config.train.memory == AUTO else config
    space = Space(uniform, devices, frozenset(fixed), hardware.node.devices, island)
    counts = Counter[str]()
    solver = _BranchAndBound(space, hardware, stack, memory_fraction)
    for tps in (solver.tps_in_node, solver.tps_across_nodes):
        if best := solver.fastest(tps, results, counts, tell):
            if config.train.memory == AUTO:
                free = (plan.config.model_copy(update={"train": config.train}) for plan in best)
                best = sorted((Plan.of(each, hardware, stack) for each in free), key=lambda plan: plan.parts.step_s)
            return SearchResult(space, counts, best)
    smallest = solver.smallest([*solver.tps_in_node, *solver.tps_across_nodes])
    for doubled in range(1, MAX_DOUBLINGS + 1) if smallest else ():
        solver = _BranchAndBound(replace(space, devices=devices << doubled), hardware, stack, memory_fraction)
        if larger := solver.smallest(solver.tps_in_node, below=solver.memory_limit + 1):
            return SearchResult(space, counts, [], smallest, larger)
    return SearchResult(space, counts, [], smallest)


def row(layout: Layout) -> Layout:
    """Reduce a layout to its table row: vpp, schedule, recomputation and zero trade memory for little time, and so does
    what ranks exchange along cp.
    """
    plain = layout._replace(cp_mode="", cp_a2a_size=1, vpp=1, schedule="", recompute="", zero=0)
    return plain._replace(reshard=None, dp_shard=None)


class _BranchAndBound:
    """Branch and bound over a space's layouts, on some hardware with some stack."""

    def __init__(self, space: Space, hardware: Hardware, stack: Stack, memory_fraction: float) -> None:
        self._space, self._hardware, self._stack = space, hardware, stack
        machines = hardware.machines[: count_islands(hardware, space.devices)]
        self._all_bounds = [Bounds(space, machine, stack) for machine in machines]
        self._bounds = self._all_bounds[0]
        self.memory_limit = int(memory_fraction * hardware.memory_limit(space.devices))
        tps = divisors(space.devices, space.config.model.num_heads)
        self.tps_in_node = [tp for tp in tps if hardware.node.devices % tp == 0]  # tp groups inside a node
        self.tps_across_nodes = [] if "parallel.tp" in space.fixed else [tp for tp in tps if tp not in self.tps_in_node]

    def fastest(
        self, tps: Collection[int], results: int, counts: Counter[str], tell: Callable[[str], None]
    ) -> list[Plan]:
        """Simulate layouts with these tp in the order of their bounds, and add to `counts`. Layouts with more
        recomputation than a fitting one, or with weights or gradients that are sent more often, are skipped.
        """
        sizes = {layout: self._bounds.memory(layout) for layout in self._space.layouts(tps)}
        small = list[tuple[float, Layout]]()
        for number, (layout, size) in enumerate(sizes.items()):
            if number % TOLD == 0:
                tell(f"bounds of {number:,} of {len(sizes):,} layouts")
            if size <= self.memory_limit:
                # a stage in all islands waits for the slowest; others share out layers, at best as on the fastest
                least = min if layout.pp > 1 and layout.far_axis == "pp" else max
                small.append((least(bounds.step_s(layout) for bounds in self._all_bounds), layout))
        best, fitting = dict[Layout, tuple[float, int, Layout]](), set[Layout]()
        too_large, limit = len(sizes) - len(small), math.inf
        for number, (bound, layout) in enumerate(sorted(small)):
            if bound > limit:
                break
            end = f" of {limit:.4g} s" if limit < math.inf else ""
            tell(f"{number:,} of {len(small):,} layouts, by their bounds: {bound:.4g} s{end}")
            in_row = best.get(row(layout))
            faster = {layout._replace(recompute=ops) for ops in RECOMPUTE[: RECOMPUTE.index(layout.recompute)]}
            fewer = {2: (1,) * self._stack.reduces_each, 3: (1, 2)}.get(layout.zero, ())  # reductions or gathers
            faster |= {layout._replace(zero=zero, reshard=None, dp_shard=None) for zero in fewer}
            if (in_row and bound > in_row[0]) or not faster.isdisjoint(fitting):
                continue
            size = self._fullest(layout, self.memory_limit)
            if size > self.memory_limit:
                too_large += 1
                continue
            fitting.add(layout)
            split = self._balanced if len(self._all_bounds) > 1 else self._plan  # even stages would wait for slow ones
            timed = split(layout).parts.step_s, size, layout
            best[row(layout)] = min(in_row or timed, timed)
            limit = sorted(best.values())[results - 1][0] if len(best) >= results else math.inf
        pruned = len(sizes) - too_large - len(fitting)
        counts.update(legal=len(sizes), too_large=too_large, pruned=pruned, simulated=len(fitting))
        plans = (self._balanced(layout) for *_, layout in sorted(best.values())[:results])
        return sorted(plans, key=lambda plan: plan.parts.step_s)

    def _balanced(self, layout: Layout) -> Plan:
        """Return the plan of a layout, with layers split over its stages by time where that fits and pays."""
        plan, key = self._plan(layout), "parallel.layers_per_chunk"
        if layout.pp == 1 or key in self._space.fixed:
            return plan
        sizes = self._bounds.balanced(layout, plan.parts.slowness)
        uneven = replace(plan, config=plan.config.changed(parallel={"layers_per_chunk": sizes}))
        if any(run_rules(RULES, dict(uneven.config))) or uneven.parts.step_s > (1 - MIN_GAIN) * plan.parts.step_s:
            return plan
        return uneven if uneven.fullest(self.memory_limit) <= self.memory_limit else plan

    def smallest(self, tps: Collection[int], below: float = math.inf) -> Plan | None:
        """Find the layout with these tp and the lowest memory; None without a layout `below` this number of bytes."""
        best: Layout | None = None
        lean = ((self._bounds.memory(layout), layout) for layout in self._space.layouts(tps, lean=True))
        for bound, layout in sorted(lean):
            if bound >= below:
                break
            size = self._fullest(layout, below)
            if size < below:
                below, best = size, layout
        return self._plan(best) if best else None

    def _fullest(self, layout: Layout, limit: float) -> int:
        return Plan(self._space.with_layout(layout), self._hardware, self._stack).fullest(limit)

    def _plan(self, layout: Layout) -> Plan:
        return Plan(self._space.with_layout(self._bounds.in_blocks(layout)), self._hardware, self._stack)
