"""A figure of a plan: memory by pipeline stage, step time by cause, and throughput over devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megascale.core.errors import MegascaleError
from megascale.core.files import atomic_file
from megascale.core.units import GIB
from megascale.plan.search.plan import Plan
from megascale.plan.search.report import CAUSES, MIN_SHARE, format_layout


def draw(path: Path, plan: Plan, sweep: Sequence[Plan]) -> None:
    """Write a PNG atomically. Raises: OSError; MegascaleError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        missing = "--plot draws with matplotlib, which is not installed"
        raise MegascaleError(missing, hint="pip install matplotlib") from error
    figure = Figure(figsize=(7 * (2 + bool(sweep)), 5), layout="constrained")
    panels = figure.subplots(1, 2 + bool(sweep))
    memory, time = panels[:2]
    stages, kinds = range(len(plan.ranks)), vars(plan.ranks[0])
    _stack(memory, stages, {kind: [vars(rank)[kind] / GIB for rank in plan.ranks] for kind in kinds})
    memory.axhline(plan.memory_limit / GIB, color="black", linestyle="--", label="limit")
    memory.set(xlabel="pipeline stage", ylabel="GiB", title="memory of a rank, by formulas")
    memory.set(xlim=(-0.7, len(stages) - 0.3), xticks=stages[:: -(-len(stages) // 20)])
    plans = [*sweep] or [plan]
    steps = [each.estimate for each in plans]
    percent = {CAUSES[cause]: [100 * e.causes[cause] / e.step_s for e in steps] for cause in steps[0].causes}
    shown = {name: values for name, values in percent.items() if max(values) >= 100 * MIN_SHARE}
    _stack(time, [str(each.config.world_size) for each in plans], shown)
    time.set(xlabel="devices", ylabel="% of a step", title="where the time goes")
    if sweep:
        devices, rates = [each.config.world_size for each in sweep], [each.estimate.tokens_per_s for each in sweep]
        panels[2].plot(devices, rates, marker="o", label="planned")
        panels[2].plot(devices, [rates[0] * count / devices[0] for count in devices], linestyle="--", label="linear")
        panels[2].set(xlabel="devices", ylabel="tokens/s", title="scaling", xscale="log", yscale="log")
        panels[2].legend()
    figure.suptitle(f"{plan.config.name}: {format_layout(plan)} on {plan.hardware.name} with {plan.stack.name}")
    with atomic_file(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def _stack(panel: Any, places: Sequence[Any], parts: Mapping[str, list[float]]) -> None:
    """Draw stacked bars with a legend."""
    below = [0.0] * len(places)
    for label, sizes in parts.items():
        panel.bar(places, sizes, bottom=below, label=label)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", reverse=True)
