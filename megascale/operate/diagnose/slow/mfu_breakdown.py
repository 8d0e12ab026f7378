"""Where each second of a run went, as a waterfall from the peak to the achieved MFU, beside what `plan` predicted.

Times are measured, as means over ranks: own times of actions, waits for communication, activities of the host, and
what lies outside of steps. They add up to the wall time, in which steps with missing rows have no part: they are left
out with their FLOPs, and a remark counts them. Events do not tell GEMMs from attention: forward and backward
are divided by the kernels of a step that ran under a profiler (`observe.profile_step`). The bubble of the schedule,
computed from the measured forwards and backwards, is taken out of the waits in which ranks spend it: of pp, and at the
end of the pipeline of the step's totals and of dp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megascale.operate.diagnose.slow.step_cube import OTHER, Booleans, Columns, StepCube
from megascale.record.events import COMPUTE, HOST_AXIS, OPTIMIZER_ACTIONS, PAUSE
from megascale.record.label import BACKWARD, FORWARD
from megascale.schedule.ir import COMPUTE_KINDS

BETWEEN, RESTARTS, LOST, PROFILED = "between steps", "restarts", "lost steps", "profiled steps"
OPTIMIZER, BUBBLE = "optimizer", "bubble"
ACTIONS = {kind: compute.phase for kind, compute in COMPUTE_KINDS.items()}
ACTIONS |= dict.fromkeys(OPTIMIZER_ACTIONS, OPTIMIZER)

PLANNED = {
    OPTIMIZER: ("optimizer",), "tp": ("tp",), "cp": ("cp",), "ep": ("ep",), "pp": ("pp",), BUBBLE: ("bubble",),
    "dp": ("dp",), OTHER: ("other", "scale", "cores"),
}  # fmt: skip
"""Causes of a plan (`simulate.step_time.Estimate`) by part of the breakdown."""

KERNEL_PARTS = {"GEMMs": "gemm", "attention": "attention", "element-wise": "elementwise"}
"""Parts of forward and backward by the purposes of kernels, and their causes in a plan."""

PLANNED_COMPUTE = ("gemm", "attention", "elementwise", "recompute", "host", "offload")
"""Causes of a plan that are measured as forward and backward together."""

BUBBLE_AXES = ("pp", "world", "dp")  # in whose waits ranks spend the bubble, in the order in which it is taken out
MIN_SHOWN = 5e-4  # smallest share of the time that the table shows


class Level(NamedTuple):
    """A bar of the waterfall: `points` of MFU, as a share of 1, and the MFU that is left after it."""

    name: str
    points: float
    left: float


@dataclass(frozen=True)
class MfuBreakdown:
    """The time of the steps `first_step` to `last_step`, as means over ranks: `wall_s`, and `seconds` by part.

    `mfu`: achieved, `training_mfu`: of the steps alone, as in a run's lines; both of full attention, None if the
    peak is unknown. `plan`: RUN/plan.json, what `megascale plan --json` said at the run's start, or the `reason` why
    there is none. `kernels`: share of the time of forward and backward in each of KERNEL_PARTS, by a profile of
    `profiled_step`; empty without one. `remarks`: what is missing, and why.
    """

    first_step: int
    last_step: int
    steps: int
    wall_s: float
    seconds: Mapping[str, float]
    mfu: float | None
    plan: Mapping[str, Any]
    kernels: Mapping[str, float] = field(default_factory=dict)
    profiled_step: int = 0
    remarks: tuple[str, ...] = ()
    training_mfu: float | None = None

    @property
    def waterfall(self) -> tuple[Level, ...]:
        """Bars from the peak to the achieved MFU: parts that do not compute, then what compute loses below the peak."""
        computing = (FORWARD, BACKWARD)
        left, levels = 1.0, [Level("peak", 1.0, 1.0)]
        for name, seconds in self.seconds.items():
            if name not in computing:
                left -= seconds / self.wall_s
                levels.append(Level(name, -seconds / self.wall_s, left))
        if self.mfu is not None:
            levels.append(Level("compute below the peak", self.mfu - left, self.mfu))
            levels.append(Level("achieved", self.mfu, self.mfu))
        return tuple(levels)

    def planned(self, part: str) -> float | None:
        """Return the seconds of a step that the plan gives a part; None if it has no such part."""
        causes = self.plan.get("causes_s", {})
        return sum(causes.get(cause, 0.0) for cause in PLANNED[part]) if causes and part in PLANNED else None

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the waterfall."""
        return asdict(self) | {"waterfall": [level._asdict() for level in self.waterfall]}

    def to_text(self) -> str:
        """Return the table."""
        rows = [("part of the time", "s/step", "share", "MFU points", "plan s/step"), *self._rows()]
        first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([name.ljust(first), *map(str.rjust, row, widths)]).rstrip() for name, *row in rows]
        return "\n".join([*lines, *self._notes()])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        per_step = self.wall_s / max(1, self.steps)
        compute = sum(self.seconds.get(name, 0.0) for name in (FORWARD, BACKWARD))
        causes = self.plan.get("causes_s", {})
        modelled = sum(causes.get(cause, 0.0) for cause in PLANNED_COMPUTE) if causes else None
        yield self._row("forward and backward", compute, modelled, "")
        yield from (self._row(f"  {name}", self.seconds.get(name, 0.0), None, "") for name in (FORWARD, BACKWARD))
        for name, share in self.kernels.items():
            yield self._row(f"  {name}", share * compute, causes.get(KERNEL_PARTS[name]), "")
        for level in self.waterfall[1:]:
            seconds, planned = self.seconds.get(level.name), self.planned(level.name)
            if seconds is not None and (abs(level.points) >= MIN_SHOWN or (planned or 0.0) >= MIN_SHOWN * per_step):
                yield self._row(level.name, seconds, planned, f"{100 * level.points:.1f}")
        step_s = self.plan.get("step_time_s")
        yield "all", f"{per_step:.4g}", "100.0%", "", "" if step_s is None else f"{step_s:.4g}"
        if self.mfu is not None:
            (below, _), planned_mfu = self.waterfall[-2:], self.plan.get("mfu_full")
            yield below.name, "", "", f"{100 * below.points:.1f}", ""
            plan = "" if planned_mfu is None else f"{planned_mfu:.1%}"
            yield "MFU achieved, full", "", "", f"{100 * self.mfu:.1f}", plan
        if self.training_mfu is not None:
            yield "while training, full", "", "", f"{100 * self.training_mfu:.1f}", ""

    def _row(self, name: str, seconds: float, planned: float | None, points: str) -> tuple[str, ...]:
        plan = "" if planned is None else f"{planned:.4g}"
        return name, f"{seconds / max(1, self.steps):.4g}", f"{seconds / self.wall_s:.1%}", points, plan

    def _notes(self) -> Iterator[str]:
        if reason := self.plan.get("reason"):
            yield f"no plan: {reason}"
        causes = {name: self.plan.get("causes_s", {}).get(name, 0.0) for name in PLANNED_COMPUTE}
        if self.kernels:
            yield f"GEMMs, attention and element-wise: shares of the kernels in step {self.profiled_step}, profiled"
        elif total := sum(causes.values()):
            shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in causes.items() if seconds)
            yield f"forward and backward by the plan's model, not measured: {shares}"
        if BUBBLE in self.seconds:
            yield "the bubble is computed from measured forwards and backwards, and taken out of waits"
        if self.mfu is None:
            yield "MFU n/a: the peak of the devices is not known"
        yield from self.remarks


def _wall_time(cube: StepCube, steps: Columns, profiled: Booleans) -> tuple[float, dict[str, float], tuple[int, float]]:
    """Return the wall time of a cube's steps, from the first to the last, over all attempts, as means over ranks: the
    seconds of steps without those under a profiler, those outside by part, and number and seconds of steps that are
    left out of both. `steps`: the table, with all attempts, and also with steps that the cube lacks: their time is
    known, but not what was done in it. `profiled`: rows of it.
    """
    if not len(cube.steps):
        return 0.0, {}, (0, 0.0)
    columns = {name: np.asarray(steps[name]) for name in ("attempt", "step", "rank", "start_ns", "end_ns")}
    first, last = int(cube.steps[0]), int(cube.steps[-1])
    # of the last attempt up to the cube's last: the next steps are not whole
    ahead = (columns["attempt"] == columns["attempt"].max()) & (columns["step"] > last)
    mine = (columns["step"] >= first) & ~ahead & (cube.places.index(columns["rank"]) >= 0)
    keys, at, ranks = np.unique(
        np.stack([columns[name][mine].astype(np.int64) for name in ("attempt", "step")]), axis=1, return_inverse=True,
        return_counts=True,
    )  # fmt: skip
    (attempt, number), at, zero_ns = keys, at.reshape(-1), columns["start_ns"][mine].min()
    start, end = (np.bincount(at, (columns[name][mine] - zero_ns) / 1e9) / ranks for name in ("start_ns", "end_ns"))
    under_profiler, took = np.bincount(at, profiled[mine]) > 0, end - start
    newest = np.zeros(int(number.max()) + 1, np.int64)
    np.maximum.at(newest, number, attempt)
    stays = (attempt == newest[number]) & (number <= last)  # most of the others a later attempt ran again
    known = stays & np.isin(number, cube.steps)
    same = np.diff(attempt) == 0
    absent, apart = np.where(same, np.diff(number) - 1, 0), start[1:] - end[:-1]
    left_out_s = float(took[stays & ~known].sum() + apart[absent > 0].sum())
    inside_s = float(took[known & ~under_profiler].sum())
    outside = {
        BETWEEN: 0.0, RESTARTS: float(apart[~same].clip(0).sum()), LOST: float(took[~stays].sum()),
        PROFILED: float(took[known & under_profiler].sum()),
    }  # fmt: skip
    outside[BETWEEN] = max(0.0, float(end.max() - start.min()) - left_out_s - inside_s - sum(outside.values()))
    named = {name: seconds for name, seconds in outside.items() if seconds}
    return inside_s, named, (int((stays & ~known).sum() + absent.sum()), left_out_s)


def kernel_shares(purposes: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each of KERNEL_PARTS. `purposes`: seconds of kernels by purpose; those of the optimizer and
    of communication are no part of forward and backward.
    """
    inside = {name: seconds for name, seconds in purposes.items() if name not in ("optimizer", "communication")}
    gemms, attention, whole = inside.get("gemm", 0.0), inside.get("attention", 0.0), sum(inside.values())
    parts = zip(KERNEL_PARTS, (gemms, attention, whole - gemms - attention), strict=True)
    return {name: seconds / whole for name, seconds in parts} if whole else {}


def mfu_breakdown(
    cube: StepCube, steps: Columns, peak_flops: float, *, bubble_s: float = 0.0, plan: Mapping[str, Any] | None = None,
    purposes: Mapping[str, float] | None = None, profiled_step: int = 0,
) -> MfuBreakdown:  # fmt: skip
    """Return the breakdown of a cube's steps. `steps`: the table, with all attempts. `peak_flops`: of all ranks.
    `bubble_s`: of a step, computed from the measured forwards and backwards. `purposes`: seconds of the kernels of
    `profiled_step` by purpose.
    """
    first, last = (int(cube.steps[0]), int(cube.steps[-1])) if len(cube.steps) else (0, -1)
    tags = np.array(["profile" in tags.split(",") for tags in np.asarray(steps["tags"]).tolist()], bool)
    inside_s, outside, (left_out, left_out_s) = _wall_time(cube, steps, tags)
    cube = cube.take(~np.isin(cube.steps, np.asarray(steps["step"])[tags]))
    seconds: dict[str, float] = dict.fromkeys((FORWARD, BACKWARD, OPTIMIZER), 0.0)
    for at, part in enumerate(cube.parts):
        if part.name == PAUSE:  # in the time of other parts
            continue
        if part.axis == COMPUTE:
            name, values = ACTIONS.get(part.name, OTHER), cube.own[:, :, at]
        else:
            host = part.axis == HOST_AXIS
            axis = "dp" if part.axis == "edp" else part.axis  # of experts, as in a plan
            name, values = (part.name if host else axis), (cube.own if host else cube.wait)[:, :, at]
        seconds[name] = seconds.get(name, 0.0) + float(values.sum(dtype=np.float64)) / max(1, len(cube.places.rank))
    left = bubble_s * len(cube.steps)
    for axis in BUBBLE_AXES if bubble_s else ():
        taken = min(left, seconds.get(axis, 0.0))
        seconds[axis], left = seconds.get(axis, 0.0) - taken, left - taken
        seconds[BUBBLE] = seconds.get(BUBBLE, 0.0) + taken
    seconds[OTHER] = inside_s - sum(value for name, value in seconds.items() if name != OTHER)
    seconds |= outside
    flops, wall_s = float(cube.flops.sum()), inside_s + sum(outside.values())
    training_s = float(cube.wall.sum(dtype=np.float64)) / max(1, len(cube.places.rank))
    times = (wall_s, training_s) if peak_flops else (0.0, 0.0)
    mfu, training_mfu = (flops / (peak_flops * time_s) if time_s else None for time_s in times)
    lacks = f"{left_out} steps are left out, {left_out_s:.4g} s: the store lacks rows of some ranks or of all"
    return MfuBreakdown(
        first, last, len(cube.steps), wall_s, seconds, mfu, plan or {}, kernel_shares(purposes or {}),
        profiled_step, (lacks,) if left_out else (), training_mfu,
    )  # fmt: skip
