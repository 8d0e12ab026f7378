"""Cubes of a run, read from its event store: the newest steps of all ranks, a sample of the whole run, and the means
over ranks of every step.

Steps beyond the newest of the last attempt are left out: the run has gone back to an earlier checkpoint, and earlier
attempts' later steps were abandoned. A step of several attempts counts in the last of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megascale.eventstore.query import fetch
from megascale.layout.topology import AXES
from megascale.observe.step_cube import Columns, StepCube, first_alike

if TYPE_CHECKING:
    import duckdb

MAX_ROWS = 12_000_000
"""Most rows of `step_parts` that a cube is made of: 50 steps of 12,288 ranks with 20 parts."""

RECENT_STEPS = 500
"""Most steps of a cube of all ranks."""

SAMPLED_RANKS, SAMPLED_STEPS = 512, 2000
"""Most ranks and steps of a sample of the whole run."""

NEWEST_STEP = "(SELECT coalesce(max(step), 0) FROM steps WHERE attempt = (SELECT max(attempt) FROM steps))"
"""The newest step of the last attempt, in SQL."""

_RANKS_WITH_PARTS = (
    "SELECT attempt, step, count(DISTINCT rank) AS with_parts FROM step_parts "
    "WHERE axis = 'step' GROUP BY attempt, step"
)
_WHOLE = " AND ".join((
    *(f"{ranks} = max({ranks}) OVER (PARTITION BY attempt)"
      for ranks in ("count(DISTINCT rank)", "coalesce(any_value(with_parts), 0)")),
    "attempt = max(attempt) OVER (PARTITION BY step)",
))  # fmt: skip
"""The condition, in SQL, that a step is of the last attempt that ran it, and has rows of all ranks."""

_MEASURES = ("count", "total_ns", "exposed_ns", "bytes", "last_issue_ns")


def recent_cube(store: duckdb.DuckDBPyConnection, steps: int = RECENT_STEPS) -> StepCube:
    """Read the newest steps of all ranks."""
    rows = fetch(store, "SELECT count(*) AS rows, count(DISTINCT step) AS steps FROM step_parts WHERE step > 0")
    per_step = int(rows["rows"][0]) / max(1, int(rows["steps"][0]))
    count = max(1, min(steps, int(MAX_ROWS / max(1.0, per_step))))
    newest = f"SELECT DISTINCT step FROM steps WHERE step <= {NEWEST_STEP} ORDER BY step DESC LIMIT {count}"
    return _read(store, f"step IN ({newest})", "true")


def sampled_cube(store: duckdb.DuckDBPyConnection) -> StepCube:
    """Read steps and ranks at equal distances over the whole run."""
    sizes = fetch(store, "SELECT count(DISTINCT step) AS steps, count(DISTINCT rank) AS ranks FROM steps")
    step_stride = -(-int(sizes["steps"][0]) // SAMPLED_STEPS) or 1
    rank_stride = -(-int(sizes["ranks"][0]) // SAMPLED_RANKS) or 1
    return _read(store, f"step % {step_stride} = 0 AND step <= {NEWEST_STEP}", f"rank % {rank_stride} = 0")


def _read(store: duckdb.DuckDBPyConnection, of_step: str, of_rank: str) -> StepCube:
    """Read the steps and ranks that meet two conditions."""
    trained = "attempt <= (SELECT max(attempt) FROM steps)"  # the newest ranks may not have come to a step
    ranks = fetch(store, f"SELECT * FROM ranks WHERE {of_rank} AND {trained}")
    of_step += f" AND attempt >= {first_alike(ranks)}"
    distinct = "SELECT DISTINCT axis, name, chunk FROM step_parts"
    parts = fetch(store, f"{distinct} ORDER BY ALL")
    numbered = f"SELECT *, row_number() OVER (ORDER BY axis, name, chunk) - 1 AS part FROM ({distinct})"
    columns = ", ".join(("attempt", "rank", "step", "part", *_MEASURES))
    joined = f"step_parts JOIN ({numbered}) USING (axis, name, chunk)"
    rows = fetch(store, f"SELECT {columns} FROM {joined} WHERE step > 0 AND {of_step} AND {of_rank}")
    part = rows.pop("part")
    step_parts = rows | {name: column[part] for name, column in parts.items()}  # a text for each row would fill memory
    steps = fetch(store, f"SELECT * FROM steps WHERE {of_step} AND {of_rank}")
    return StepCube.from_tables(step_parts, steps, ranks)


def mean_cube(store: duckdb.DuckDBPyConnection) -> tuple[StepCube, Columns]:
    """Read the means over ranks of all steps: a cube of one rank, and the table `steps` of the same form, also with
    abandoned steps. The cube lacks steps of which rows of ranks are missing: their means are not those of all.
    """
    times = ", ".join(f"avg({name})::BIGINT AS {name}" for name in ("start_ns", "end_ns", "train_ns"))
    others = ", ".join(f"max({name}) AS {name}" for name in ("tags", "tokens", "flops"))
    steps = fetch(
        store, f"SELECT attempt, 0 AS rank, step, {times}, {others}, {_WHOLE} AS whole "
        f"FROM steps LEFT JOIN ({_RANKS_WITH_PARTS}) USING (attempt, step) GROUP BY attempt, step ORDER BY ALL"
    )  # fmt: skip
    sums = ", ".join(f"sum({name}) / ranks AS {name}" for name in _MEASURES)
    keys = "attempt, step, axis, name, chunk"
    ranks = "(SELECT attempt, step, count(*) AS ranks FROM steps GROUP BY attempt, step)"
    step_parts = fetch(
        store,
        f"SELECT {keys}, 0 AS rank, {sums} FROM step_parts JOIN {ranks} USING (attempt, step) GROUP BY {keys}, ranks",
    )
    one = {"attempt": np.zeros(1, int), "rank": np.zeros(1, int), "node": np.array(["mean"], object)}
    kept = steps.pop("whole") & (steps["step"] <= int(fetch(store, f"SELECT {NEWEST_STEP} AS step")["step"][0]))
    of_steps = {name: column[kept] for name, column in steps.items()}
    return StepCube.from_tables(step_parts, of_steps, one | dict.fromkeys(AXES, np.zeros(1, int))), steps


def peak_flops(store: duckdb.DuckDBPyConnection) -> float:
    """Return the peak FLOP/s of all ranks of the last attempt together; 0 if that of any rank is unknown. Ranks without
    a row count with the mean of the others.
    """
    peaks = _peaks(store)
    return peaks[max(peaks)] if peaks else 0.0


def mean_peak_flops(store: duckdb.DuckDBPyConnection, steps: Columns) -> float:
    """Return the peak FLOP/s of all ranks together, as the mean over the time of the attempts in the table `steps`: a
    job that shrank has fewer devices. 0 if the peak of any rank is unknown.
    """
    attempt, peaks, peak_s, all_s = np.asarray(steps["attempt"]), _peaks(store), 0.0, 0.0
    for number in peaks.keys() & set(attempt.tolist()):
        mine = attempt == number
        seconds = float(steps["end_ns"][mine].max() - steps["start_ns"][mine].min()) / 1e9
        peak_s, all_s = peak_s + seconds * peaks[number], all_s + seconds
        if not peaks[number]:
            return 0.0
    return peak_s / all_s if all_s else 0.0


def _peaks(store: duckdb.DuckDBPyConnection) -> dict[int, float]:
    ranks = "greatest(max(world), count(DISTINCT rank))"
    known = f"CASE WHEN min(peak_flops) > 0 THEN avg(peak_flops) * {ranks} ELSE 0 END"
    found = fetch(store, f"SELECT attempt, {known} AS peak FROM ranks GROUP BY attempt")
    return dict(zip(found["attempt"].tolist(), found["peak"].tolist(), strict=True))
