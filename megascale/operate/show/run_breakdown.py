"""The breakdown of a run's time, from its event store, its configuration, and the plan that it saved at its start."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megascale.core.errors import MegascaleError
from megascale.core.named_run import CONFIG_FILE, RunFolderError
from megascale.layout.chunks import stages_of
from megascale.layout.recompute_policy import joined_chunks
from megascale.layout.stages import Place
from megascale.operate.diagnose.slow.cube_queries import mean_cube, mean_peak_flops
from megascale.operate.diagnose.slow.mfu_breakdown import MfuBreakdown, mfu_breakdown
from megascale.operate.diagnose.slow.step_cube import StepCube
from megascale.operate.show.run_config import read_run_config
from megascale.plan.simulate.event_simulator import StageTimes
from megascale.plan.simulate.extrapolate import Pipeline, pipeline_time
from megascale.plan.simulate.profiles import Overlaps
from megascale.record.events import COMPUTE
from megascale.schedule.ir import Kind, each_action
from megascale.schedule.lower import order_of

if TYPE_CHECKING:
    import duckdb

BUBBLE_STEPS = 50  # steps whose forwards and backwards the bubble is computed from
FORWARDS, BACKWARDS = (Kind.F, Kind.VS), (Kind.B, Kind.I, Kind.W, Kind.VT)  # the actions whose times make the bubble


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
    forward, backward, weights = dict[Place, float](), dict[Place, float](), dict[Place, float]()
    for rank in range(p.pp):
        actions = Counter(action[:2] for action in each_action(order_of(schedule, p.pp, p.vpp, m, rank)))
        for chunk in range(p.vpp + (p.vocab_pp > 0)):  # the last: passes over the vocabulary
            seconds = partial(_seconds, cube, rank, chunk)
            longer = 1 + sum(map(seconds, ("tp", "cp", "ep"))) / max(seconds(COMPUTE, *FORWARDS, *BACKWARDS), 1e-12)
            forward[rank, chunk] = longer * seconds(COMPUTE, *FORWARDS) / m
            backward[rank, chunk] = longer * seconds(COMPUTE, *BACKWARDS) / m
            # a schedule may split some of the backwards only
            weights[rank, chunk] = longer * seconds(COMPUTE, Kind.W) / max(1, actions[Kind.W, chunk])
    chunks = StageTimes(forward, backward, 0.0, 0.0, {}, {}, weight_gradient=weights)
    busy = m * ((1 + config.dropped_share) * sum(forward.values()) + sum(backward.values())) / p.pp
    parts, keep = config.num_chunks, config.data.sequence_chunks_saved
    joined = joined_chunks(config.train, p, stages_of(config.model, p))
    pipeline = Pipeline(schedule, p.pp, p.vpp, m, parts=parts, keep=keep, joined=joined, barriers=p.vocab_pp)
    return pipeline_time(pipeline, chunks, Overlaps(tp="none", pp=True, dp=True)) - busy


def _seconds(cube: StepCube, rank: int, chunk: int, axis: str, *names: str) -> float:
    """Return the mean own time of a chunk's actions in a step, or that of the waits of an axis in its actions."""
    at = [index for index in cube.select(axis, *names) if cube.parts[index].chunk == chunk]
    values = (cube.own if axis == COMPUTE else cube.wait)[:, :, at].sum(2)
    return float(np.nanmean(cube.mean(values)[cube.places.coords["pp"] == rank]))
