"""The breakdown of a run's time, from its event store, its configuration, and the plan that it saved at its start."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megascale.core.errors import MegascaleError
from megascale.core.named_run import CONFIG_FILE, RunFolderError
from megascale.layout.recompute_policy import joined_chunks
from megascale.operate.diagnose.slow.cube_queries import mean_cube, mean_peak_flops
from megascale.operate.diagnose.slow.mfu_breakdown import MfuBreakdown, mfu_breakdown
from megascale.operate.diagnose.slow.step_cube import StepCube
from megascale.operate.show.run_config import read_run_config
from megascale.plan.simulate.event_simulator import StageTimes
from megascale.plan.simulate.extrapolate import Pipeline, pipeline_time
from megascale.plan.simulate.profiles import Overlaps
from megascale.record.events import COMPUTE
from megascale.schedule.ir import Kind

if TYPE_CHECKING:
    import duckdb

BUBBLE_STEPS = 50  # steps whose forwards and backwards the bubble is computed from
WORK = (Kind.F, Kind.B, Kind.I, Kind.W)  # the actions whose times make the bubble


def run_breakdown(store: duckdb.DuckDBPyConnection, folder: Path, recent: StepCube) -> MfuBreakdown | None:
    """Return the breakdown of all steps of a run; None before its first complete step. `recent`: the newest
    BUBBLE_STEPS steps, from which the bubble is computed.
    """
    cube, steps = mean_cube(store)
    if not len(cube.steps):
        return None
    purposes, step = Counter[str](), 0  # seconds of kernels, summed over the pipeline stages that were profiled
    for path in sorted((folder / "kernels").glob("stage-*.json")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            profile = json.loads(path.read_text(encoding="utf-8"))
            purposes.update({str(name): float(value) for name, value in profile["seconds"].items()})
            step = int(profile["step"])
    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        plan = {"reason": f"{folder / 'plan.json'} cannot be read"}
    bubble_s, remarks = 0.0, list[str]()
    try:
        bubble_s = _bubble(recent, folder)
    except (OSError, MegascaleError) as error:
        remarks.append(f"the bubble is not computed: {error}")
    found = mfu_breakdown(
        cube, steps, mean_peak_flops(store, steps), bubble_s=bubble_s,
        plan=plan if isinstance(plan, dict) else {}, purposes=purposes, profiled_step=step,
    )  # fmt: skip
    return replace(found, remarks=(*found.remarks, *remarks))


def _bubble(cube: StepCube, folder: Path) -> float:
    """Return the seconds of a step in which the mean rank waits for its schedule, were messages free and peers equal.

    A chunk takes the mean of its ranks, with their waits for tensor-parallel peers.
    Raises: MegascaleError or OSError if it cannot be computed
    """
    if (config := read_run_config(folder)) is None:
        raise RunFolderError(f"{folder} has no {CONFIG_FILE}")
    if config.parallel.pp == 1:
        return 0.0
    if config.parallel.skip_ratio:
        raise RunFolderError("the bubble of a partial pipeline is not computed (parallel.skip_ratio)")
    if missing := set(range(config.parallel.pp)) - set(cube.places.coords["pp"][cube.ordinary.any(1)].tolist()):
        stages = ", ".join(map(str, sorted(missing)))
        raise RunFolderError(f"the store has no ordinary step of pipeline stage {stages}")
    p, m, schedule = config.parallel, config.num_microbatches, config.parallel.schedule
    assert schedule, "a resolved configuration names its schedule"
    stage, times = cube.places.coords["pp"], {kind: dict[tuple[int, int], float]() for kind in WORK}
    for rank in range(p.pp):
        for chunk in range(p.vpp):
            own = {name: np.nanmean(cube.mean(_chunk(cube, COMPUTE, chunk, name))[stage == rank]) / m for name in WORK}
            waits = (
                sum(np.nanmean(cube.mean(_chunk(cube, axis, chunk))[stage == rank]) for axis in ("tp", "cp", "ep")) / m
            )
            for name, seconds in own.items():
                times[name][rank, chunk] = float(seconds * (1 + waits / max(sum(own.values()), 1e-12)))
    backward = {place: sum(times[kind][place] for kind in WORK[1:]) for place in times[Kind.F]}
    chunks = StageTimes(times[Kind.F], backward, 0.0, 0.0, {}, {}, weight_gradient=times[Kind.W])
    forwards = 1 + config.dropped_share
    busy = m * (forwards * sum(times[Kind.F].values()) + sum(backward.values())) / p.pp
    parts, keep, joined = config.num_chunks, config.data.sequence_chunks_saved, joined_chunks(config.train, p)
    pipeline = Pipeline(schedule, p.pp, p.vpp, m, parts=parts, keep=keep, joined=joined)
    return pipeline_time(pipeline, chunks, Overlaps(tp="none", pp=True, dp=True)) - busy


def _chunk(cube: StepCube, axis: str, chunk: int, *names: str) -> Any:
    """Return the own time of a chunk's actions, or the waits of an axis in its actions, [R, S]."""
    at = [index for index in cube.select(axis, *names) if cube.parts[index].chunk == chunk]
    return (cube.own if axis == COMPUTE else cube.wait)[:, :, at].sum(2)
