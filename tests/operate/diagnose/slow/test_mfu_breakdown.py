"""The ledger's parts add up to the wall time, restarts and lost steps included, and end at the achieved MFU."""

from __future__ import annotations

import numpy as np
import pytest

from lab.fleet import Fleet
from lab.fleet_tables import FLOPS, PEAK_FLOPS, cube_of
from lab.fleet_times import FleetFault, FleetLayout
from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow.mfu_breakdown import MfuBreakdown, mfu_breakdown
from megascale.operate.diagnose.slow.step_cube import StepCube

LAYOUT = FleetLayout(Topology(tp=4, pp=4, dp=4), steps=40)
PLAN = {
    "step_time_s": 0.4, "mfu_full": 0.25,
    "causes_s": {"gemm": 0.2, "attention": 0.05, "tp": 0.01, "pp": 0.01, "dp": 0.02, "bubble": 0.08, "optimizer": 0.03},
}  # fmt: skip


def ledger(fleet: Fleet, **options: object) -> MfuBreakdown:
    peak = PEAK_FLOPS * fleet.layout.topology.world_size
    return mfu_breakdown(cube_of(fleet), fleet.tables["steps"], peak, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fault", [FleetFault(), FleetFault("gc", share=4, every=16), FleetFault("data", rank=0, share=5, every=3)]
)
def test_parts_add_up(fault: FleetFault) -> None:
    fleet = Fleet(LAYOUT, 1, fault)
    found = ledger(fleet)
    assert found.wall_s == pytest.approx(fleet.seconds.sum(), rel=1e-6)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, rel=1e-6)
    assert abs(found.seconds["other"]) < 0.01 * found.wall_s  # all else is measured: 1% is not accounted for at most
    assert found.mfu == pytest.approx(FLOPS * 40 / found.wall_s / PEAK_FLOPS)
    assert found.seconds["gc"] > 0 if fault.kind == "gc" else "gc" not in found.seconds


def test_the_waterfall_ends_at_the_achieved_mfu() -> None:
    found = ledger(Fleet(LAYOUT, 2))
    first, *between, last = found.waterfall
    assert first.left == 1.0
    assert first.points + sum(level.points for level in between) == pytest.approx(last.left)
    assert last.left == found.mfu
    lines = found.to_text().splitlines()
    assert lines[-2].split()[-1] == f"{100 * (found.mfu or 0):.1f}"


def test_waits_are_not_compute() -> None:
    fleet = Fleet(LAYOUT, 3, FleetFault("slow", rank=63, factor=2.0))
    mine, healthy = ledger(fleet), ledger(Fleet(LAYOUT, 3))
    waits = [sum(found.seconds[axis] for axis in ("tp", "pp", "dp", "world")) for found in (mine, healthy)]
    compute = [found.seconds["forward"] + found.seconds["backward"] for found in (mine, healthy)]
    assert compute[0] == pytest.approx(compute[1] * (1 + 1.3 / 1.1 / 64), rel=0.02)
    assert waits[0] - waits[1] == pytest.approx(mine.wall_s - healthy.wall_s - (compute[0] - compute[1]), rel=0.02)


def restarted(fleet: Fleet) -> dict[str, np.ndarray]:
    """The table of steps, with an earlier attempt that ran the first 10 steps and stopped 100 s before this one."""
    steps = fleet.tables["steps"]
    old = {name: column[steps["step"] <= 10].copy() for name, column in steps.items()}
    shift = int(old["end_ns"].max() - steps["start_ns"].min()) + 100_000_000_000
    old["start_ns"], old["end_ns"] = old["start_ns"] - shift, old["end_ns"] - shift
    later = steps | {"attempt": np.ones_like(steps["attempt"])}
    return {name: np.concatenate([old[name], later[name]]) for name in steps}


def test_restarts_and_lost_steps() -> None:
    fleet = Fleet(LAYOUT, 4)
    steps = restarted(fleet)
    parts = fleet.tables["step_parts"] | {"attempt": np.ones_like(fleet.tables["step_parts"]["attempt"])}
    ranks = fleet.tables["ranks"] | {"attempt": np.ones_like(fleet.tables["ranks"]["attempt"])}
    found = mfu_breakdown(StepCube.from_tables(parts, steps, ranks), steps, 1.0)
    flops = FLOPS * 40 * LAYOUT.topology.world_size
    assert found.training_mfu == pytest.approx(flops / fleet.seconds.sum(), rel=1e-5)
    assert found.mfu == pytest.approx(flops / found.wall_s)
    assert f"while training, full {100 * found.training_mfu:.1f}" in " ".join(found.to_text().split())
    assert found.seconds["restarts"] == pytest.approx(100.0)
    assert found.seconds["lost steps"] == pytest.approx(fleet.seconds[:10].sum(), rel=1e-6)
    assert found.wall_s == pytest.approx(100 + fleet.seconds[:10].sum() + fleet.seconds.sum(), rel=1e-6)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, rel=1e-6)


def test_steps_with_a_profiler_are_a_part_of_their_own() -> None:
    fleet = Fleet(LAYOUT, 4)
    profiled = np.isin(fleet.tables["steps"]["step"], (20, 21))
    fleet.tables["steps"]["tags"][profiled] = "gc,profile"
    found, whole = ledger(fleet), Fleet(LAYOUT, 4).seconds
    assert found.seconds["profiled steps"] == pytest.approx(whole[19:21].sum(), rel=1e-6)
    assert found.steps == 38
    assert found.wall_s == pytest.approx(whole.sum(), rel=1e-6)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, rel=1e-6)
    assert abs(found.seconds["other"]) < 0.01 * found.wall_s


def test_the_plan_stands_beside() -> None:
    found = ledger(Fleet(LAYOUT, 5), plan=PLAN, bubble_s=0.05)
    assert found.seconds["bubble"] == pytest.approx(2.0)
    assert found.planned("bubble") == 0.08
    rows = {line.split("  ")[0]: line.split() for line in found.to_text().splitlines()}
    assert rows["forward and backward"][-1] == "0.25"
    assert rows["dp"][-1] == "0.02"
    assert rows["all"][-1] == "0.4"
    assert "gemm 80%, attention 20%" in found.to_text()
    assert "not measured" in found.to_text()


def test_forward_and_backward_are_divided_by_a_profile() -> None:
    purposes = {"gemm": 3.0, "attention": 1.0, "norms": 0.5, "copies": 0.5, "optimizer": 7.0, "communication": 9.0}
    found = ledger(Fleet(LAYOUT, 5), plan=PLAN, purposes=purposes, profiled_step=10)
    assert found.kernels == {"GEMMs": 0.6, "attention": 0.2, "element-wise": 0.2}
    rows = {line.split("  ")[1].strip(): line.split() for line in found.to_text().splitlines() if line[:2] == "  "}
    compute = (found.seconds["forward"] + found.seconds["backward"]) / found.steps
    assert float(rows["GEMMs"][1]) == pytest.approx(0.6 * compute, rel=1e-3)
    assert (rows["GEMMs"][-1], rows["attention"][-1]) == ("0.2", "0.05")
    assert "shares of the kernels in step 10, profiled" in found.to_text()
    assert "not measured" not in found.to_text()


def test_without_plan_or_peak() -> None:
    fleet = Fleet(LAYOUT, 6)
    found = mfu_breakdown(cube_of(fleet), fleet.tables["steps"], 0.0, plan={"reason": "no profile of this machine"})
    assert found.mfu is None
    assert "no plan: no profile of this machine" in found.to_text()
    assert "MFU n/a" in found.to_text()
    assert found.to_json()["waterfall"][0]["name"] == "peak"
