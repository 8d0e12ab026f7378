"""Cubes of a run, read from its event store: the newest steps of all ranks, a sample of the whole run, and the means
over ranks of every step.

Steps beyond the newest of the last attempt are left out: the run has gone back to an earlier checkpoint, and earlier
attempts' later steps were abandoned. A step of several attempts counts in the last of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megascale.layout.topology import AXES
from megascale.operate.diagnose.slow.step_cube import Columns, Part, Places, StepCube, first_alike
from megascale.operate.store.query import NEWEST_STEP, fetch, fetch_coded
from megascale.operate.store.schema import STEP_AXIS

if TYPE_CHECKING:
    import duckdb

MAX_ROWS = 12_000_000  # most rows of `step_parts` that a cube is made of: 50 steps of 12,288 ranks with 20 parts
RECENT_STEPS = 500  # most steps of a cube of all ranks
COUNTED_STEPS = 8  # newest steps whose rows are counted; of the very last some are missing yet
SAMPLED_RANKS, SAMPLED_STEPS = 64, 2000  # most ranks and steps of a sample of the run: with 20 parts 2.6 million rows

_RANKS_WITH_PARTS = (
    "SELECT attempt, step, count(DISTINCT rank) AS with_parts FROM step_parts "
    "WHERE axis = 'step' GROUP BY attempt, step"
)
_WHOLE = " AND ".join((
    *(f"{ranks} = max({ranks}) OVER (PARTITION BY attempt)"
      for ranks in ("count(DISTINCT rank)", "coalesce(any_value(with_parts), 0)")),
    "attempt = max(attempt) OVER (PARTITION BY step)",
))  # fmt: skip
"""The condition, in SQL, for a step of its last attempt with rows of all ranks."""

MESSAGE_COLUMNS = (
    "attempt", "rank", "step", "name", "layer", "stage", "direction", "microbatch", "peer", "start_ns", "end_ns",
)  # fmt: skip
"""Columns of `events` that the delays of messages are taken from."""

MESSAGE_ROWS = 2_000_000  # most rows of `events` that the delays of messages are taken from: those of the newest steps

_MEASURES = ("count", "total_ns", "exposed_ns", "bytes", "last_issue_ns")


def recent_cube(store: duckdb.DuckDBPyConnection, steps: int = RECENT_STEPS) -> StepCube:
    """Read the newest steps of all ranks."""
    newest = _newest_step(store)
    last = f"step > {newest - COUNTED_STEPS} AND step <= {newest}"
    by_step = f"SELECT count(*) AS rows FROM step_parts WHERE {last} GROUP BY attempt, step"
    rows = int(fetch(store, f"SELECT coalesce(max(rows), 1) AS rows FROM ({by_step})")["rows"][0])
    count = max(1, min(steps, MAX_ROWS // rows))
    return _read(store, _ranks(store), f"step > {newest - count} AND step <= {newest}")


def sampled_cube(store: duckdb.DuckDBPyConnection) -> StepCube:
    """Read steps and ranks at equal distances over the whole run."""
    ranks, newest = _ranks(store), _newest_step(store)
    present = Places.from_table(ranks).rank
    sample = present[present % max(1, -(-len(present) // SAMPLED_RANKS)) == 0]
    mine = np.isin(ranks["rank"], sample)
    ranks = {name: column[mine] for name, column in ranks.items()}
    alike = f"attempt >= {first_alike(ranks)}"
    first = int(fetch(store, f"SELECT coalesce(min(step), 1) AS step FROM steps WHERE {alike}")["step"][0])
    stride = max(1, -(-(newest - first + 1) // SAMPLED_STEPS))
    numbers = ", ".join(map(str, [-1, *sample.tolist()]))  # a list, by which files of other nodes are passed over
    return _read(store, ranks, f"step % {stride} = 0 AND step <= {newest} AND rank IN ({numbers})")


def read_places(store: duckdb.DuckDBPyConnection) -> Places:
    """Read the ranks of the last attempt."""
    return Places.from_table(_ranks(store))


def _newest_step(store: duckdb.DuckDBPyConnection) -> int:
    """Return NEWEST_STEP: with the number, queries pass over the files of other steps."""
    return int(fetch(store, f"SELECT {NEWEST_STEP} AS step")["step"][0])


def _ranks(store: duckdb.DuckDBPyConnection) -> Columns:
    """Return the table `ranks` up to the last attempt that came to a step."""
    return fetch(store, "SELECT * FROM ranks WHERE attempt <= (SELECT max(attempt) FROM steps)")


def _read(store: duckdb.DuckDBPyConnection, ranks: Columns, condition: str) -> StepCube:
    """Read the rows that meet a condition, of the attempts in which `ranks` are where they are now."""
    condition = f"step > 0 AND attempt >= {first_alike(ranks)} AND {condition}"
    group = "coalesce(group_name, '') AS group_name"  # files of earlier versions have none
    columns = ", ".join(("attempt", "rank", "step", *Part._fields[:-1], group, *_MEASURES))
    step_parts = fetch_coded(store, f"SELECT {columns} FROM step_parts WHERE axis <> '{STEP_AXIS}' AND {condition}")
    columns = "attempt, rank, step, train_ns, tags, tokens, flops"
    steps = fetch_coded(store, f"SELECT {columns} FROM steps WHERE {condition}")
    return StepCube.from_tables(step_parts, steps, ranks)


def recent_messages(store: duckdb.DuckDBPyConnection, since: int) -> Columns:
    """Read the rows of `events` with messages from step `since` on, of MESSAGE_ROWS rows those of the newest steps: of
    the last attempt of each step, up to the newest step.
    """
    last = f"(SELECT (max(attempt), step) FROM steps WHERE step >= {since} AND step <= {NEWEST_STEP} GROUP BY step)"
    messages = f"events WHERE peer >= 0 AND step >= {since} AND (attempt, step) IN {last}"
    counts = fetch(store, f"SELECT step, count(*) AS rows FROM {messages} GROUP BY step ORDER BY step DESC")
    newest = counts["step"][np.cumsum(counts["rows"]) <= MESSAGE_ROWS].min(initial=np.iinfo(np.int32).max)
    return fetch_coded(store, f"SELECT {', '.join(MESSAGE_COLUMNS)} FROM {messages} AND step >= {newest}")


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
    keys = f"attempt, step, {', '.join(Part._fields[:-1])}"
    ranks = "(SELECT attempt, step, count(*) AS ranks FROM steps GROUP BY attempt, step)"
    step_parts = fetch_coded(
        store, f"SELECT {keys}, '' AS group_name, 0 AS rank, {sums} FROM step_parts JOIN {ranks} USING (attempt, step) "
        f"WHERE axis <> '{STEP_AXIS}' GROUP BY {keys}, ranks"
    )  # fmt: skip
    one = {"attempt": np.zeros(1, int), "rank": np.zeros(1, int), "node": np.array(["mean"], object)}
    kept = steps.pop("whole") & (steps["step"] <= _newest_step(store))
    of_steps = {name: column[kept] for name, column in steps.items()}
    one |= dict.fromkeys(AXES, np.zeros(1, int))
    return StepCube.from_tables(step_parts, of_steps, one), steps


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
