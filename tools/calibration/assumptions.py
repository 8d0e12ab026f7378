"""Worth of the assumptions about step time: published steps, planned with and without an assumption.

Nothing is refitted. Planned steps without an assumption are scaled per accelerator to the median with the assumption,
as a fitted GEMM rate would do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any, TypeVar

from calibration.fit import FIRST_YEAR, Profiles, mean_error
from calibration.rows import Row, goals
from megascale.config.section import Section
from megascale.plan.simulate.profiles import Hardware, Overlaps, Stack
from megascale.plan.simulate.step_time import StepParts

Profiled = TypeVar("Profiled", bound=Section)

WITHOUT: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "waves": {"hardware.device.units": 1},
    "attention": {"hardware.device.attention": {}},
    "generation": {"stack.generation": FIRST_YEAR},
    "fp8": {"hardware.attained.fp8": {}},
    "slowdown": {"stack.attained.slowdown": 1.0},
    "elementwise": {"hardware.attained.memory": 1.0, "stack.attained.passes": 1.0},
    "overlaps": {"stack.overlaps": Overlaps()},
    "overlap": {"hardware.attained.overlap": 1.0},
    "link": {"hardware.attained.link": 1.0},
    "network": {"hardware.attained.network": 1.0},
    "latency": {"hardware.node.latency": 0.0, "hardware.network.latency": 0.0},
    "host_s": {"stack.host_s": 0.0},
    "step_s": {"stack.attained.step_s": 0.0},
    "scale_loss": {"stack.attained.scale_loss": 0.0},
}
"""Values that disable an assumption, by key of the hardware or stack profile."""


class Machine(Section):
    """Hardware and stack of a published step."""

    hardware: Hardware
    stack: Stack


def worth(rows: Sequence[Row]) -> Iterator[tuple[str, list[str]]]:
    """Yield, by disabled assumption, the mean and the largest change of a step time, and the mean error of every
    accelerator in `goals`, as percentages.
    """
    fitted, groups = Profiles(rows), goals(rows)
    machines = {}
    for row in rows:
        hardware, stack = fitted.of(row, {})
        machines[row.line] = Machine(hardware=hardware, stack=stack)
    planned = seconds(rows, machines)
    for name, values in WITHOUT.items():
        changed = seconds(rows, {line: without(machine, values) for line, machine in machines.items()})
        changes = [abs(changed[line] / planned[line] - 1) for line in planned]
        cells = [f"{mean(changes):.1%}", f"{max(changes):.0%}"]
        for group in groups.values():
            shift = median(changed[row.line] / planned[row.line] for row in group)
            cells.append(f"{mean_error(group, {row.line: changed[row.line] / shift for row in group}):.1%}")
        yield name, cells


def seconds(rows: Sequence[Row], machines: Mapping[int, Machine]) -> dict[int, float]:
    """Plan the step time of every row, by line number."""
    pairs = [(row, machines[row.line]) for row in rows]
    return {row.line: StepParts(row.config, machine.hardware, machine.stack).step_s for row, machine in pairs}


def without(machine: Machine, values: Mapping[str, Any]) -> Machine:
    """Return the machine with new values for some dotted keys."""
    for key, value in values.items():
        machine = replaced(machine, key, value)
    return machine


def replaced(section: Profiled, key: str, value: Any) -> Profiled:
    """Return a copy of a section with a new value for a dotted key."""
    name, _, rest = key.partition(".")
    return section.model_copy(update={name: replaced(getattr(section, name), rest, value) if rest else value})


def fill(page: str, worths: Iterable[tuple[str, list[str]]]) -> str:
    """Write the cells of every assumption to the end of the Markdown row that begins with the assumption's name."""
    for name, cells in worths:
        row = re.compile(rf"^(\| \*\*{name}\*\* \|[^|\n]*\|).*$", re.MULTILINE)
        assert len(row.findall(page)) == 1, f"the page has one row for {name}"
        page = row.sub(rf"\1 {' | '.join(cells)} |", page)
    return page
