"""A plan as one picture: memory by pipeline stage, the step's time by cause, and what more devices bring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale.core.errors import MegascaleError
from megascale.core.files import atomic
from megascale.core.units import GIB
from megascale.plan.report import KINDS, WORDS, Plan, memory


def draw(path: Path, plan: Plan, sweep: Sequence[Plan]) -> None:
    """Write a PNG, at once or not at all.

    Raises: OSError; MegascaleError where matplotlib is not installed
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MegascaleError(
            "--plot draws with matplotlib, which is not installed", mend="pip install matplotlib"
        ) from error
    figure = Figure(figsize=(7 * (2 + bool(sweep)), 5), layout="constrained")
    panels = figure.subplots(1, 2 + bool(sweep))
    _memory(panels[0], plan)
    _time(panels[1], [*sweep] or [plan])
    if sweep:
        _scaling(panels[2], sweep)
    p = plan.config.parallel
    figure.suptitle(
        f"{plan.config.name}: tp {p.tp}, pp {p.pp}, vpp {p.vpp}, dp {plan.config.dp} on {plan.hardware.name} with "
        f"{plan.stack.name}"
    )
    with atomic(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def _memory(panel: Any, plan: Plan) -> None:
    stages, below = range(len(plan.ranks)), [0.0] * len(plan.ranks)
    for kind in KINDS:
        sizes = [memory(rank)[kind] / GIB for rank in plan.ranks]
        panel.bar(stages, sizes, bottom=below, label=kind)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    panel.axhline(plan.room / GIB, color="black", linestyle="--", label="room")
    panel.set(xlabel="pipeline stage", ylabel="GiB", title="memory of a rank, by formulas")
    panel.set(xlim=(-0.7, len(stages) - 0.3), xticks=stages[:: -(-len(stages) // 20)])
    _beside(panel)


def _time(panel: Any, plans: Sequence[Plan]) -> None:
    names, below = [str(plan.config.world) for plan in plans], [0.0] * len(plans)
    for cause in plans[0].estimate.causes:
        shares = [100 * plan.estimate.causes[cause] / plan.estimate.step_s for plan in plans]
        if max(shares) < 0.05:
            continue
        panel.bar(names, shares, bottom=below, label=WORDS[cause])
        below = [low + share for low, share in zip(below, shares, strict=True)]
    panel.set(xlabel="devices", ylabel="% of a step", title="where the time goes")
    _beside(panel)


def _scaling(panel: Any, plans: Sequence[Plan]) -> None:
    devices = [plan.config.world for plan in plans]
    rates = [plan.estimate.tokens_per_s for plan in plans]
    panel.plot(devices, rates, marker="o", label="planned")
    panel.plot(devices, [rates[0] * each / devices[0] for each in devices], linestyle="--", label="linear")
    panel.set(xlabel="devices", ylabel="tokens/s", title="scaling", xscale="log", yscale="log")
    panel.legend()


def _beside(panel: Any) -> None:
    """What the colours mean, where it hides nothing."""
    panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", reverse=True)
